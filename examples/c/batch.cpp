// Several prompts at once: each is prefilled, then one sweep over the weights decodes them all.
//
//     batch MODEL MAX_TOKENS PROMPT [PROMPT ...]
//
// A MODEL of - is atlas-tiny, which is in the package.
#include <atlas.hpp>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

static int run(int argc, char **argv) {
    const std::size_t max_tokens = std::strtoul(argv[2], nullptr, 10);
    const char *model = std::string(argv[1]) == "-" ? nullptr : argv[1];
    atlas::engine engine(model, atlas::load_options().set("kv_tokens", std::int64_t(4096)));
    const atlas::tokenizer tokenizer = engine.tokenizer();

    std::vector<atlas::sequence> sequences;
    std::vector<atlas_sequence *> handles;
    std::vector<atlas::tokens> outputs;
    atlas::tokens next;
    atlas::logits rows;
    for (int i = 3; i < argc; ++i) {
        sequences.push_back(engine.sequence());
        sequences.back().prefill(tokenizer.encode(argv[i]), rows);
        handles.push_back(sequences.back().native());
        next.push_back(rows.argmax());
        outputs.push_back({next.back()});
    }
    for (std::size_t step = 1; step < max_tokens; ++step) {
        engine.decode_batch(next, handles, rows);
        next = rows.argmax_batch();
        for (std::size_t i = 0; i < next.size(); ++i) outputs[i].push_back(next[i]);
    }
    for (const atlas::tokens &output : outputs) {
        std::cout << "tokens:";
        for (const std::int32_t token : output) std::cout << ' ' << token;
        std::cout << '\n';
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        std::cerr << "usage: " << argv[0] << " MODEL MAX_TOKENS PROMPT [PROMPT ...]\n";
        return 2;
    }
    try {
        return run(argc, argv);
    } catch (const atlas::error &error) {
        std::cerr << error.name() << ": " << error.what() << '\n';
        return 1;
    }
}
