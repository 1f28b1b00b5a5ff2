// Translate standard input line by line, in batches; each line of output is one of input.
//
//     translate_file MODEL SOURCE TARGET [NUM_BEAMS] < in.txt > out.txt
#include <atlas.hpp>

#include <iostream>
#include <string>
#include <vector>

static const std::size_t batch_size = 64;

static bool is_blank(const std::string &line) {
    return line.find_first_not_of(" \t\r") == std::string::npos;
}

static int run(int argc, char **argv) {
    atlas::engine engine(argv[1]);
    atlas::beam_search beams;
    if (argc > 4) beams.set("num_beams", argv[4]);

    std::vector<std::string> lines, texts;
    const auto flush = [&] {
        std::vector<atlas::event> found;
        if (!texts.empty()) found = engine.translate(texts, argv[2], argv[3], &beams);
        std::size_t next = 0;
        for (const std::string &line : lines)
            std::cout << (is_blank(line) ? "" : found[next++].text()) << '\n';
        lines.clear();
        texts.clear();
    };
    for (std::string line; std::getline(std::cin, line);) {
        if (!is_blank(line)) texts.push_back(line);
        lines.push_back(line);
        if (lines.size() == batch_size) flush();
    }
    flush();
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        std::cerr << "usage: " << argv[0] << " MODEL SOURCE TARGET [NUM_BEAMS]\n";
        return 2;
    }
    try {
        return run(argc, argv);
    } catch (const atlas::error &error) {
        std::cerr << error.name() << ": " << error.what() << '\n';
        return 1;
    }
}
