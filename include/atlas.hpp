/* Atlas for C++17: owners of atlas.h's handles, and exceptions in place of statuses.  Header only and
 * thin: every call is one call of atlas.h, whose comments hold here too, and native() gives the handle
 * to what this file leaves out.
 */
#ifndef ATLAS_HPP
#define ATLAS_HPP

#include <atlas.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace atlas {

/* A failed call: its status, and its message as what(). */
class error : public std::runtime_error {
public:
    explicit error(atlas_status status)
        : std::runtime_error(atlas_error_message()), status_(status) {}
    atlas_status status() const noexcept { return status_; }
    const char *name() const noexcept { return atlas_status_name(status_); }

private:
    atlas_status status_;
};

inline void check(atlas_status status) {
    if (status != ATLAS_OK) throw error(status);
}

/* Owns one handle and frees it; moved, not copied. */
template <class T, atlas_status (*Free)(T *)>
class owner {
public:
    owner() noexcept = default;
    explicit owner(T *handle) noexcept : handle_(handle) {}
    owner(owner &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    owner &operator=(owner &&other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~owner() {
        if (handle_ != nullptr) Free(handle_);
    }
    T *native() const noexcept { return handle_; }
    T **out() noexcept { return &handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

private:
    T *handle_ = nullptr;
};

/* Token ids that somebody else owns. */
class token_span {
public:
    token_span(const std::int32_t *data, std::size_t size) noexcept : data_(data), size_(size) {}
    token_span(const std::vector<std::int32_t> &ids) noexcept : token_span(ids.data(), ids.size()) {}
    const std::int32_t *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }

private:
    const std::int32_t *data_;
    std::size_t size_;
};

using tokens = std::vector<std::int32_t>;

/* fill(buffer, capacity, &count), first for the count. */
template <class T, class Fill>
std::vector<T> filled(Fill fill) {
    std::size_t count = 0;
    check(fill(static_cast<T *>(nullptr), std::size_t(0), &count));
    std::vector<T> out(count);
    if (count != 0) check(fill(out.data(), out.size(), &count));
    return out;
}

template <class Fill>
std::string filled_text(Fill fill) {
    std::size_t length = 0;
    check(fill(nullptr, std::size_t(0), &length));
    std::string text(length, '\0');
    check(fill(text.data(), length + 1, &length)); /* a string has room for its NUL */
    return text;
}

class tokenizer : public owner<atlas_tokenizer, atlas_tokenizer_free> {
public:
    using owner::owner;
    explicit tokenizer(const std::string &model) { check(atlas_tokenizer_load(model.c_str(), out())); }

    tokens encode(std::string_view text, std::uint32_t flags = ATLAS_ADD_SPECIAL) const {
        return filled<std::int32_t>([&](std::int32_t *ids, std::size_t capacity, std::size_t *count) {
            return atlas_tokenizer_encode(native(), text.data(), text.size(), flags, ids, capacity,
                                          count);
        });
    }
    std::string decode(token_span ids, std::uint32_t flags = ATLAS_SKIP_SPECIAL) const {
        return filled_text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return atlas_tokenizer_decode(native(), ids.data(), ids.size(), flags, buffer, capacity,
                                          length);
        });
    }
    tokens encode_chat(const std::vector<atlas_message> &messages, std::uint32_t flags = 0) const {
        return filled<std::int32_t>([&](std::int32_t *ids, std::size_t capacity, std::size_t *count) {
            return atlas_tokenizer_encode_chat(native(), messages.data(), messages.size(), flags, ids,
                                               capacity, count);
        });
    }
};

class logits : public owner<atlas_logits, atlas_logits_free> {
public:
    using owner::owner;
    std::int32_t argmax(std::size_t row = 0) const {
        std::int32_t token;
        check(atlas_logits_argmax(native(), row, &token));
        return token;
    }
    tokens argmax_batch() const {
        return filled<std::int32_t>([&](std::int32_t *ids, std::size_t capacity, std::size_t *count) {
            return atlas_logits_argmax_batch(native(), ids, capacity, count);
        });
    }
    std::vector<float> to_host() const {
        return filled<float>([&](float *values, std::size_t capacity, std::size_t *count) {
            return atlas_logits_to_host(native(), values, capacity, count);
        });
    }
};

class sequence : public owner<atlas_sequence, atlas_sequence_free> {
public:
    using owner::owner;
    /* `rows` is reused: one logits object serves a whole loop. */
    void prefill(token_span prompt, logits &rows, std::int32_t mode = ATLAS_LOGITS_LAST) {
        check(atlas_sequence_prefill(native(), prompt.data(), prompt.size(), mode, rows.out()));
    }
    void decode(std::int32_t token, logits &rows) {
        check(atlas_sequence_decode(native(), token, rows.out()));
    }
    tokens verify(token_span drafts, logits *rows = nullptr) {
        tokens best(drafts.size());
        check(atlas_sequence_verify(native(), drafts.data(), drafts.size(), best.data(),
                                    rows == nullptr ? nullptr : rows->out()));
        return best;
    }
    void accept(std::size_t rows_kept) { check(atlas_sequence_accept(native(), rows_kept)); }
    void rewind(std::size_t new_len) { check(atlas_sequence_rewind(native(), new_len)); }
    void save_snapshot(std::size_t ring_slot) {
        check(atlas_sequence_save_snapshot(native(), ring_slot));
    }
    void restore_snapshot(std::size_t ring_slot) {
        check(atlas_sequence_restore_snapshot(native(), ring_slot));
    }
    sequence fork() const {
        sequence twin;
        check(atlas_sequence_fork(native(), twin.out()));
        return twin;
    }
    atlas_sequence_info info() const {
        atlas_sequence_info values;
        atlas_sequence_info_init(&values);
        check(atlas_sequence_get_info(native(), &values));
        return values;
    }
};

/* Whole numbers serve parameters of both kinds, integers and others. */
inline bool is_whole(double value) noexcept {
    return value >= -9e15 && value <= 9e15 &&
           value == static_cast<double>(static_cast<std::int64_t>(value));
}

class sampling : public owner<atlas_sampling, atlas_sampling_free> {
public:
    sampling() { check(atlas_sampling_create(out())); }
    sampling(std::initializer_list<std::pair<const char *, double>> numbers) : sampling() {
        for (const auto &[key, value] : numbers) set(key, value);
    }
    sampling &set(const char *key, const std::string &value) {
        check(atlas_sampling_set(native(), key, value.c_str()));
        return *this;
    }
    sampling &set(const char *key, double value) {
        check(is_whole(value)
                  ? atlas_sampling_set_integer(native(), key, static_cast<std::int64_t>(value))
                  : atlas_sampling_set_number(native(), key, value));
        return *this;
    }
};

class beam_search : public owner<atlas_beam_search, atlas_beam_search_free> {
public:
    beam_search() { check(atlas_beam_search_create(out())); }
    beam_search &set(const char *key, const std::string &value) {
        check(atlas_beam_search_set(native(), key, value.c_str()));
        return *this;
    }
    beam_search &set(const char *key, double value) {
        check(is_whole(value)
                  ? atlas_beam_search_set_integer(native(), key, static_cast<std::int64_t>(value))
                  : atlas_beam_search_set_number(native(), key, value));
        return *this;
    }
};

class event : public owner<atlas_event, atlas_event_free> {
public:
    using owner::owner;
    atlas_event_info info() const {
        atlas_event_info values;
        atlas_event_info_init(&values);
        check(atlas_event_get_info(native(), &values));
        return values;
    }
    std::string text() const {
        const atlas_event_info values = info();
        return std::string(values.text, values.text_len);
    }
};

class load_options : public owner<atlas_load_options, atlas_load_options_free> {
public:
    load_options() { check(atlas_load_options_create(out())); }
    load_options &set(const char *key, const std::string &value) {
        check(atlas_load_options_set(native(), key, value.c_str()));
        return *this;
    }
    load_options &set(const char *key, std::int64_t value) {
        check(atlas_load_options_set_integer(native(), key, value));
        return *this;
    }
};

/* A null `model` is atlas-tiny, the model in the package. */
class engine : public owner<atlas_engine, atlas_engine_free> {
public:
    explicit engine(const char *model) { check(atlas_engine_load(model, nullptr, out())); }
    explicit engine(const std::string &model) : engine(model.c_str()) {}
    engine(const char *model, const load_options &options) {
        atlas_load_params params;
        atlas_load_params_init(&params);
        params.options = options.native();
        check(atlas_engine_load(model, &params, out()));
    }
    engine(const std::string &model, const load_options &options) : engine(model.c_str(), options) {}
    atlas_engine_info info() const {
        atlas_engine_info values;
        atlas_engine_info_init(&values);
        check(atlas_engine_get_info(native(), &values));
        return values;
    }
    atlas::tokenizer tokenizer() const {
        atlas::tokenizer found;
        check(atlas_engine_get_tokenizer(native(), found.out()));
        return found;
    }
    atlas::sequence sequence(std::size_t budget_tokens = 0) {
        atlas::sequence made;
        check(atlas_sequence_create(native(), budget_tokens, made.out()));
        return made;
    }
    void decode_batch(token_span ids, const std::vector<atlas_sequence *> &sequences, logits &rows) {
        if (ids.size() != sequences.size()) throw std::invalid_argument("one token for each sequence");
        check(atlas_engine_decode_batch(native(), ids.data(), sequences.data(), ids.size(), rows.out()));
    }
    /* The best translations of each text, `num_return` of them as set in `beams`, text after text. */
    std::vector<event> translate(const std::vector<std::string> &texts, const std::string &source,
                                 const std::string &target, const beam_search *beams = nullptr,
                                 std::size_t num_return = 1) {
        std::vector<const char *> pointers;
        for (const std::string &text : texts) pointers.push_back(text.c_str());
        std::vector<atlas_event *> found(texts.size() * num_return, nullptr);
        const atlas_status status = atlas_translate(
            native(), pointers.data(), texts.size(), source.c_str(), target.c_str(),
            beams == nullptr ? nullptr : beams->native(), found.data(), found.size());
        std::vector<event> results;
        for (atlas_event *handle : found) results.emplace_back(handle);
        check(status);
        return results;
    }
    std::string languages() const {
        return filled_text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return atlas_engine_get_languages(native(), buffer, capacity, length);
        });
    }
    /* `on_text` sees each step's event and returns whether to go on; what it throws ends the request
     * and is thrown again here. */
    event generate(atlas_request_params params,
                   const std::function<bool(const atlas_event_info &)> &on_text = {}) {
        struct state {
            const std::function<bool(const atlas_event_info &)> &on_text;
            void *user;
            std::exception_ptr thrown;
        } own{on_text, params.user, nullptr};
        params.user = &own;
        event result;
        const atlas_generate_callback callback = [](void *user, atlas_event *news) -> std::int32_t {
            auto &self = *static_cast<state *>(user);
            try {
                atlas_event_info info;
                atlas_event_info_init(&info);
                check(atlas_event_get_info(news, &info));
                info.user = self.user;
                return self.on_text(info) ? 0 : 1;
            } catch (...) {
                self.thrown = std::current_exception();
                return 1;
            }
        };
        const atlas_status status =
            atlas_engine_generate(native(), &params, on_text ? callback : nullptr, result.out());
        if (own.thrown) std::rethrow_exception(own.thrown);
        check(status);
        return result;
    }
};

} // namespace atlas

#endif /* ATLAS_HPP */
