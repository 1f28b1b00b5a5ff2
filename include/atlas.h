/* Atlas: an embeddable LLM inference engine.  The C ABI of libatlas_llm.so; C99, C11 and C++.
 *
 * Two levels.  Token level: the caller owns sequences and calls prefill, decode, verify, accept and
 * rewind.  Request level: the caller submits requests and polls events.  Both share one engine.
 *
 * Rules that hold for every function, unless its comment says otherwise
 *
 * Status.    0 (ATLAS_OK) or an error.  atlas_error_message() then has the cause in words.  Nothing
 *            here calls exit or abort, installs a signal handler or writes to stdout or stderr.
 * Failure.   A call that fails changes nothing: sequences, handles and out-parameters are as they
 *            were before it.
 * Handles.   A handle is a token that is looked up, never an address.  NULL, freed, foreign and
 *            repeated handles are errors, in free functions too.  What a call gives out belongs to
 *            the caller, who frees it, in any order: a child keeps what it needs of its parent.
 * Arguments. Memory that the caller passes in is read or written before the call returns and not
 *            kept.  A NULL pointer is an error where the comment does not allow it.
 * Text.      UTF-8.  A length may be ATLAS_NUL_TERMINATED.  At most ATLAS_MAX_TEXT_BYTES.
 * Buffers.   (buffer, capacity, &count): count becomes what there is, without the NUL that ends
 *            text.  A NULL buffer with capacity 0 asks for the count alone and changes nothing else.
 *            A buffer that is too small (text needs count + 1 bytes) is
 *            ATLAS_ERROR_BUFFER_TOO_SMALL: count is set, the buffer and all state are as before.
 * Structs.   First zeroed and given their size by their ..._init function; all-zero members are the
 *            defaults.  A library that is older than the caller's header refuses a struct that has
 *            non-zero bytes behind the members it knows.
 * Threads.   Any function may be called from any thread.  Calls on one engine take turns.
 * Callbacks. Run in the thread of the call that they were given to (the log callback: in any
 *            thread) and may call any function.  They must return, not longjmp or throw.
 * Fork.      A process that has started Atlas may fork, but in the child every call is
 *            ATLAS_ERROR_STALE_HANDLE; exec gives a fresh start.
 */
#ifndef ATLAS_H
#define ATLAS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ATLAS_VERSION_MAJOR 0
#define ATLAS_VERSION_MINOR 1
#define ATLAS_VERSION_PATCH 0
#define ATLAS_VERSION "0.1.0"

/* The soname's number.  It changes when a function, struct member or constant is removed or changes
 * its meaning; functions, members at a struct's end and constants may be added without. */
#define ATLAS_ABI_VERSION 0

#if defined(__GNUC__) || defined(__clang__)
#define ATLAS_API __attribute__((visibility("default")))
#else
#define ATLAS_API
#endif

#define ATLAS_NUL_TERMINATED ((size_t)-1)
#define ATLAS_MAX_TEXT_BYTES ((size_t)1 << 28)

/* ---- status -------------------------------------------------------------------------------- */

typedef int32_t atlas_status;

/* 1 to 99 are the codes of the Python API's AtlasError and its children. */
enum {
    ATLAS_OK = 0,
    ATLAS_ERROR = 1,                       /* an Atlas error without a code of its own */
    ATLAS_ERROR_INVALID_ARGUMENT = 2,      /* a value outside what is allowed; the message names both */
    ATLAS_ERROR_SHAPE = 3,                 /* array sizes that disagree */
    ATLAS_ERROR_PROMPT_TOO_LONG = 4,       /* a position would reach max_seq_len */
    ATLAS_ERROR_CAPABILITY = 5,            /* the model, device or version cannot do this */
    ATLAS_ERROR_MODEL_FILE = 6,            /* a model or tokenizer file is missing or damaged */
    ATLAS_ERROR_UNSUPPORTED_MODEL = 7,     /* a sound file names something that is not supported */
    ATLAS_ERROR_KV_EXHAUSTED = 8,          /* the KV pool has too few free blocks */
    ATLAS_ERROR_OUT_OF_MEMORY = 9,
    ATLAS_ERROR_STALE_HANDLE = 10,         /* freed or overwritten, or of a parent process */
    ATLAS_ERROR_SEQUENCE_STATE = 11,       /* not allowed now: failed, or a verify is pending */
    ATLAS_ERROR_WRONG_THREAD = 12,
    ATLAS_ERROR_MODEL_BUSY = 13,
    ATLAS_ERROR_NON_FINITE_LOGITS = 14,    /* NaN or infinity in a row of logits */
    ATLAS_ERROR_CLOSED = 15,               /* the engine was freed */
    ATLAS_ERROR_TOKENIZER = 16,            /* no tokenizer, or text it cannot express */
    ATLAS_ERROR_CHAT_TEMPLATE = 17,        /* no template, or it refused the messages */
    ATLAS_ERROR_KERNEL = 18,               /* a kernel could not be compiled, loaded or run */
    ATLAS_ERROR_CANCELLED = 19,            /* by the caller */
    ATLAS_ERROR_EXPERT_COMMAND_FAILED = 20,
    ATLAS_ERROR_QUEUE_FULL = 21,           /* the engine takes no more requests now */
    ATLAS_ERROR_CALLBACK = 22,             /* a function of the user's failed */
    ATLAS_ERROR_RUNTIME = 100,             /* Atlas could not be started, or did not finish a call */
    ATLAS_ERROR_BUFFER_TOO_SMALL = 101,
    ATLAS_ERROR_INTERNAL = 102             /* a defect of Atlas; the log has the details */
};

/* The constant's name, such as "ATLAS_ERROR_CLOSED"; "ATLAS_ERROR_UNKNOWN" for other numbers.
 * Static memory; starts nothing. */
ATLAS_API const char *atlas_status_name(atlas_status status);

/* The message of the last call of this thread that failed, or "".  Never NULL; valid until this
 * thread's next failing call.  A binding that moves between threads reads it in the same stretch.
 * Starts nothing. */
ATLAS_API const char *atlas_error_message(void);

/* ---- version and runtime ------------------------------------------------------------------- */

/* ATLAS_VERSION and ATLAS_ABI_VERSION of the library, in place of the header's.  Start nothing. */
ATLAS_API const char *atlas_version(void);
ATLAS_API uint32_t atlas_abi_version(void);

/* 1 if this installation offers a capability, else 0: "device.cpu", "device.cuda", "sequence.fork",
 * "sequence.save", "speculative.verify", "speculative.mtp", "request.submit", "request.translate",
 * ...  A name that no version knows is 0 too, with a message, and so is a runtime that does not
 * start. */
ATLAS_API int32_t atlas_has(const char *capability);

/* Start the runtime; every other function does it with (NULL, NULL, 0) when this was not called.
 *
 * Atlas runs inside a Python interpreter of the version that it was built for.  When Python runs in
 * this process already, that one is used.  Otherwise it is looked for in `home`, a Python
 * installation, virtual environment or bundle; without one in $ATLAS_HOME; without that next to the
 * library's own file, and last where the library was built.  PATH and other variables have no say.
 * `paths` are folders of Python packages that are searched first.
 *
 * The runtime is never stopped.  Called again with the same arguments, or with none, it does
 * nothing.  ATLAS_ERROR_RUNTIME: no usable Python (the message says what was tried), another
 * version or a sub-interpreter runs here, or a package is missing.  After a failure to find Python
 * or packages the call may be repeated with better arguments; ATLAS_ERROR_INVALID_ARGUMENT:
 * started before, with others. */
ATLAS_API atlas_status atlas_runtime_init(const char *home, const char *const *paths,
                                          size_t num_paths);

/* How Python was found, as lines of text for people; after a failure, what was tried.  Does not
 * start the runtime. */
ATLAS_API atlas_status atlas_runtime_describe(char *buffer, size_t capacity, size_t *length);

enum {
    ATLAS_LOG_DEBUG = 10,
    ATLAS_LOG_INFO = 20,
    ATLAS_LOG_WARNING = 30,
    ATLAS_LOG_ERROR = 40
};

/* `message` is NUL-terminated and valid during the callback.  May run in any thread, also two. */
typedef void (*atlas_log_callback)(void *user, int32_t level, const char *message);

/* Send log messages of at least `level` to a callback, in place of the one before; NULL: to nobody,
 * as at the start.  After it returns, the one before is not called again, except by other threads
 * that are inside it now. */
ATLAS_API atlas_status atlas_log_set_callback(atlas_log_callback callback, void *user,
                                              int32_t level);

/* ---- handles ------------------------------------------------------------------------------- */

typedef struct atlas_engine atlas_engine;                /* a loaded model */
typedef struct atlas_load_options atlas_load_options;    /* how to load one */
typedef struct atlas_tokenizer atlas_tokenizer;          /* text to ids and back */
typedef struct atlas_detokenizer atlas_detokenizer;      /* ids to text, one by one */
typedef struct atlas_sequence atlas_sequence;            /* one stream of tokens and its state */
typedef struct atlas_logits atlas_logits;                /* rows that a forward has written */
typedef struct atlas_sampling atlas_sampling;            /* sampling parameters */
typedef struct atlas_beam_search atlas_beam_search;      /* how to search for a translation */
typedef struct atlas_sampler atlas_sampler;              /* one sample's random stream and history */
typedef struct atlas_request atlas_request;              /* a submitted request */
typedef struct atlas_event atlas_event;                  /* something that happened to a request */

/* ---- engine -------------------------------------------------------------------------------- */

/* Options of atlas_engine_load by name, with the meanings and ranges of the Python API's
 * atlas.Engine: "device", "dtype", "threads", "max_seq_len", "kv_tokens", "kv_dtype", "quantize",
 * "max_waiting", "max_running", "chunk_tokens", "prefix_cache", ...
 * An unknown key is ATLAS_ERROR_INVALID_ARGUMENT, with the nearest name; so is a value that is not
 * of the option's type.  Ranges are checked by atlas_engine_load. */
ATLAS_API atlas_status atlas_load_options_create(atlas_load_options **options);
ATLAS_API atlas_status atlas_load_options_set(atlas_load_options *options, const char *key,
                                              const char *value);
ATLAS_API atlas_status atlas_load_options_set_integer(atlas_load_options *options, const char *key,
                                                      int64_t value);
ATLAS_API atlas_status atlas_load_options_set_number(atlas_load_options *options, const char *key,
                                                     double value);
ATLAS_API atlas_status atlas_load_options_free(atlas_load_options *options);

/* Bytes of weights loaded so far and in all; called in order, a last time with both equal.  Return
 * 0 to go on; anything else ends the load with ATLAS_ERROR_CANCELLED. */
typedef int32_t (*atlas_progress_callback)(void *user, uint64_t done_bytes, uint64_t total_bytes);

typedef struct atlas_load_params {
    size_t struct_size;
    const atlas_load_options *options; /* NULL: defaults */
    atlas_progress_callback progress;  /* may be NULL */
    void *progress_user;
} atlas_load_params;

static inline void atlas_load_params_init(atlas_load_params *params) {
    memset(params, 0, sizeof *params);
    params->struct_size = sizeof *params;
}

/* Load `model`: a GGUF file, a Hugging Face folder, a Hub id in the local cache, or a short name.
 * NULL is atlas-tiny, the small model in the package (a bundle has it if it was written so).  An empty
 * text is ATLAS_ERROR_MODEL_FILE.  `params` may be NULL.  Two engines of the same file and weight
 * options share the weights. */
ATLAS_API atlas_status atlas_engine_load(const char *model, const atlas_load_params *params,
                                         atlas_engine **engine);

/* Wait for the call that runs on the engine, then release its memory and threads.  Calls that wait
 * for their turn, and later ones on its sequences, logits, samplers and requests, are
 * ATLAS_ERROR_CLOSED; those handles still have to be freed. */
ATLAS_API atlas_status atlas_engine_free(atlas_engine *engine);

typedef struct atlas_engine_info {
    size_t struct_size;
    uint64_t vocab_size;      /* logits in a row; ids are 0 ... vocab_size - 1 */
    uint64_t max_seq_len;     /* positions of a sequence at most */
    uint64_t num_layers;
    uint64_t hidden_size;
    uint64_t block_size;      /* positions of a KV block; 0 without a paged cache */
    uint64_t num_blocks;      /* of the KV pool */
    uint64_t num_free_blocks; /* now */
    uint64_t max_step_tokens; /* rows of one forward; longer prompt windows run in pieces */
    uint64_t max_step_seqs;   /* sequences of one forward */
    uint64_t max_logits_rows; /* rows of logits of one forward */
    uint64_t weights_bytes;
    uint64_t kv_bytes;
    uint64_t num_state_slots;      /* of recurrent state, one a sequence; 0: the model has none */
    uint64_t num_free_state_slots; /* now */
    uint64_t num_snapshots;        /* recurrent states that can be kept for later */
    uint64_t num_free_snapshots;   /* now */
    uint64_t state_bytes;          /* of all of these */
} atlas_engine_info;

static inline void atlas_engine_info_init(atlas_engine_info *info) {
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

/* Fill as much of `info` as its struct_size covers. */
ATLAS_API atlas_status atlas_engine_get_info(atlas_engine *engine, atlas_engine_info *info);

/* What was loaded, as a JSON object of short texts. */
ATLAS_API atlas_status atlas_engine_describe(atlas_engine *engine, char *buffer, size_t capacity,
                                             size_t *length);

/* Whether this engine's model offers a capability (names as in atlas_has; unknown ones are
 * ATLAS_ERROR_INVALID_ARGUMENT, with the nearest name). */
ATLAS_API atlas_status atlas_engine_has(atlas_engine *engine, const char *capability, int32_t *has);

/* Ids that end a completion. */
ATLAS_API atlas_status atlas_engine_get_end_tokens(atlas_engine *engine, int32_t *ids,
                                                   size_t capacity, size_t *num_ids);

/* ---- tokenizer ----------------------------------------------------------------------------- */

enum {
    ATLAS_ADD_SPECIAL = 1,   /* encode: add BOS and EOS as the model's own tokenizer would */
    ATLAS_PARSE_SPECIAL = 2, /* encode: control tokens spelled out in the text count; trusted text */
    ATLAS_SKIP_SPECIAL = 4,  /* decode: leave out the text of special tokens */
    ATLAS_CONTINUES = 8,     /* decode: the ids continue a text, so a leading space is kept */
    ATLAS_NO_GENERATION_PROMPT = 16 /* chat: do not open the assistant's turn */
};

/* The tokenizer of a model on disk (NULL as in atlas_engine_load), without its weights, or of an
 * engine.  Usable after the engine was freed.  ATLAS_ERROR_TOKENIZER: the model came without one. */
ATLAS_API atlas_status atlas_tokenizer_load(const char *model, atlas_tokenizer **tokenizer);
ATLAS_API atlas_status atlas_engine_get_tokenizer(atlas_engine *engine, atlas_tokenizer **tokenizer);
ATLAS_API atlas_status atlas_tokenizer_free(atlas_tokenizer *tokenizer);

/* `flags`: ATLAS_ADD_SPECIAL, ATLAS_PARSE_SPECIAL.  Without the latter no text becomes a control
 * token.  ATLAS_ERROR_INVALID_ARGUMENT: the text is not UTF-8. */
ATLAS_API atlas_status atlas_tokenizer_encode(atlas_tokenizer *tokenizer, const char *text,
                                              size_t text_len, uint32_t flags, int32_t *ids,
                                              size_t capacity, size_t *num_ids);

/* `flags`: ATLAS_SKIP_SPECIAL, ATLAS_CONTINUES.  Bytes that are no UTF-8 become U+FFFD. */
ATLAS_API atlas_status atlas_tokenizer_decode(atlas_tokenizer *tokenizer, const int32_t *ids,
                                              size_t num_ids, uint32_t flags, char *buffer,
                                              size_t capacity, size_t *length);

/* The id of a vocabulary string such as "</s>", or -1. */
ATLAS_API atlas_status atlas_tokenizer_find_token(atlas_tokenizer *tokenizer, const char *token,
                                                  int32_t *id);

/* NUL-terminated UTF-8.  A content is plain text and never becomes control tokens. */
typedef struct atlas_message {
    const char *role;
    const char *content;
} atlas_message;

/* The ids of a conversation in the model's own chat format.  `flags`: ATLAS_NO_GENERATION_PROMPT. */
ATLAS_API atlas_status atlas_tokenizer_encode_chat(atlas_tokenizer *tokenizer,
                                                   const atlas_message *messages,
                                                   size_t num_messages, uint32_t flags,
                                                   int32_t *ids, size_t capacity, size_t *num_ids);

/* The same for what an array of roles and contents cannot say.  `conversation` is a JSON object with
 * "messages", optionally "tools", and further members for the template's variables. */
ATLAS_API atlas_status atlas_tokenizer_encode_chat_json(atlas_tokenizer *tokenizer,
                                                        const char *conversation, size_t text_len,
                                                        uint32_t flags, int32_t *ids,
                                                        size_t capacity, size_t *num_ids);

/* Text as it becomes certain: whole characters only, and the pieces join to what
 * atlas_tokenizer_decode gives.  `flags` as there.  push takes one id; flush ends the text, gives out
 * what is held back, and starts afresh. */
ATLAS_API atlas_status atlas_detokenizer_create(atlas_tokenizer *tokenizer, uint32_t flags,
                                                atlas_detokenizer **detokenizer);
ATLAS_API atlas_status atlas_detokenizer_push(atlas_detokenizer *detokenizer, int32_t id,
                                              char *buffer, size_t capacity, size_t *length);
ATLAS_API atlas_status atlas_detokenizer_flush(atlas_detokenizer *detokenizer, char *buffer,
                                               size_t capacity, size_t *length);
ATLAS_API atlas_status atlas_detokenizer_free(atlas_detokenizer *detokenizer);

/* ---- sequences ----------------------------------------------------------------------------- */

/* An empty sequence; it takes KV blocks as it grows.  `budget_tokens`: the most positions it may
 * reach, 0 for max_seq_len. */
ATLAS_API atlas_status atlas_sequence_create(atlas_engine *engine, size_t budget_tokens,
                                             atlas_sequence **sequence);

/* A second sequence that stands where `sequence` stands; blocks are shared until written. */
ATLAS_API atlas_status atlas_sequence_fork(atlas_sequence *sequence, atlas_sequence **forked);

/* Give the blocks back.  Waits for the call that runs on the engine. */
ATLAS_API atlas_status atlas_sequence_free(atlas_sequence *sequence);

enum { ATLAS_SEQUENCE_ACTIVE = 0, ATLAS_SEQUENCE_FAILED = 1 };

typedef struct atlas_sequence_info {
    size_t struct_size;
    uint64_t seq_len;     /* positions whose state is committed */
    uint64_t prompt_len;  /* of these, prompt tokens */
    uint64_t verify_rows; /* rows of a verify that awaits accept, else 0 */
    uint64_t num_blocks;
    int32_t state;        /* ATLAS_SEQUENCE_FAILED: only free is allowed */
    int32_t reserved;
} atlas_sequence_info;

static inline void atlas_sequence_info_init(atlas_sequence_info *info) {
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

/* Fill as much of `info` as its struct_size covers. */
ATLAS_API atlas_status atlas_sequence_get_info(atlas_sequence *sequence, atlas_sequence_info *info);

/* The ids at its positions. */
ATLAS_API atlas_status atlas_sequence_get_tokens(atlas_sequence *sequence, int32_t *ids,
                                                 size_t capacity, size_t *num_ids);

/* Take KV blocks for positions 0 ... num_positions - 1 now, all or none. */
ATLAS_API atlas_status atlas_sequence_reserve(atlas_sequence *sequence, size_t num_positions);

/* Drop the positions from `new_len` on.  ATLAS_ERROR_SEQUENCE_STATE: a verify is pending, or the
 * model has recurrent state that does not stand there: restore a snapshot first. */
ATLAS_API atlas_status atlas_sequence_rewind(atlas_sequence *sequence, size_t new_len);

/* Recurrent state ("recurrent" in atlas_engine_has) is not undone by dropping positions.  Copy it
 * as it stands into place `ring_slot` of the sequence's ring (0 ... 3), and make it the live state
 * again; then rewind to the length that it was saved at.  ATLAS_ERROR_CAPABILITY: the model has
 * none. */
ATLAS_API atlas_status atlas_sequence_save_snapshot(atlas_sequence *sequence, size_t ring_slot);
ATLAS_API atlas_status atlas_sequence_restore_snapshot(atlas_sequence *sequence,
                                                       size_t ring_slot);

/* 0: taken; anything else ends the save with ATLAS_ERROR_CANCELLED. */
typedef int32_t (*atlas_write_callback)(void *user, const void *bytes, size_t num_bytes);
/* Bytes put into the buffer, 0 at the end; negative ends the restore with ATLAS_ERROR_CANCELLED. */
typedef int64_t (*atlas_read_callback)(void *user, void *buffer, size_t capacity);

/* Write the state of a sequence, and read it into an empty one of the same model: it continues
 * bitwise as the saved one.  All that is read is checked first. */
ATLAS_API atlas_status atlas_sequence_save(atlas_sequence *sequence, atlas_write_callback write,
                                           void *user);
ATLAS_API atlas_status atlas_sequence_restore(atlas_sequence *sequence, atlas_read_callback read,
                                              void *user);

/* ---- forwards ------------------------------------------------------------------------------ */

/* Which rows of a forward get logits. */
enum { ATLAS_LOGITS_LAST = 0, ATLAS_LOGITS_ALL = 1, ATLAS_LOGITS_NONE = 2 };

/* `logits` of a forward may be NULL: nobody wants the rows.  Else *logits is NULL, and a new handle
 * is put there, or it is a logits handle of this engine, which names the new rows from then on; so a
 * loop needs one handle and one free.  Where a forward makes no rows, an old handle names none, and
 * NULL stays.  Rows live in buffers of the engine: later forwards overwrite them, and the handle is
 * then ATLAS_ERROR_STALE_HANDLE.  A row depends on its own sequence only, bitwise. */

/* Run a whole prompt on an empty sequence.  ATLAS_ERROR_KV_EXHAUSTED and others: nothing happened. */
ATLAS_API atlas_status atlas_sequence_prefill(atlas_sequence *sequence, const int32_t *tokens,
                                              size_t num_tokens, int32_t logits_mode,
                                              atlas_logits **logits);

/* Run positions [chunk_start, chunk_start + chunk_len) of the prompt `tokens`, which is the same in
 * every call; chunk_start is where the chunk before ended.  ATLAS_LOGITS_LAST makes a row in the
 * chunk that ends the prompt.  Any split that is allowed gives the bits of one pass. */
ATLAS_API atlas_status atlas_sequence_prefill_chunk(atlas_sequence *sequence, const int32_t *tokens,
                                                    size_t num_tokens, size_t chunk_start,
                                                    size_t chunk_len, int32_t logits_mode,
                                                    atlas_logits **logits);

/* Append a token and run it: one row of logits.  The sequence holds at least one position. */
ATLAS_API atlas_status atlas_sequence_decode(atlas_sequence *sequence, int32_t token,
                                             atlas_logits **logits);

/* The same for `num` distinct sequences of the engine in one sweep; row i is sequences[i]'s. */
ATLAS_API atlas_status atlas_engine_decode_batch(atlas_engine *engine, const int32_t *tokens,
                                                 atlas_sequence *const *sequences, size_t num,
                                                 atlas_logits **logits);

/* One window of one prompt, as in atlas_sequence_prefill_chunk. */
typedef struct atlas_prefill_slice {
    atlas_sequence *sequence;
    const int32_t *tokens;
    size_t num_tokens;
    size_t chunk_start;
    size_t chunk_len;
} atlas_prefill_slice;

/* One decode step of `num_decode` sequences and one window of each of `num_slices` prompts, every
 * weight read once.  Either number may be 0.  `slice_logits` is NULL or an array of num_slices
 * handles, each as `logits` above.  On failure no sequence has moved. */
ATLAS_API atlas_status atlas_engine_forward_mixed(
    atlas_engine *engine, const int32_t *decode_tokens, atlas_sequence *const *decode_sequences,
    size_t num_decode, const atlas_prefill_slice *slices, size_t num_slices, int32_t logits_mode,
    atlas_logits **decode_logits, atlas_logits **slice_logits);

/* Run `num_tokens` step tokens, [last accepted token, draft 0, draft 1, ...], in one sweep.
 * `argmax`, NULL or num_tokens ids, becomes the greedy token after each row (-1: the row is not
 * finite); `logits` the rows, for sampling.  Row r is bitwise what decoding one by one gives.
 * Exactly one of atlas_sequence_accept and atlas_sequence_free must follow. */
ATLAS_API atlas_status atlas_sequence_verify(atlas_sequence *sequence, const int32_t *tokens,
                                             size_t num_tokens, int32_t *argmax,
                                             atlas_logits **logits);

/* Keep the first `rows_kept` rows of a verify, 0 ... num_tokens; the first is the last accepted
 * token's.  Outside: the verify still awaits its accept. */
ATLAS_API atlas_status atlas_sequence_accept(atlas_sequence *sequence, size_t rows_kept);

/* ---- logits -------------------------------------------------------------------------------- */

/* A handle that names no rows has 0.  Stale rows still have their number. */
ATLAS_API atlas_status atlas_logits_get_shape(atlas_logits *logits, size_t *num_rows,
                                              size_t *vocab_size);

/* Copy all rows, row after row, as float32. */
ATLAS_API atlas_status atlas_logits_to_host(atlas_logits *logits, float *buffer, size_t capacity,
                                            size_t *count);

/* The greatest logit's id, the lowest on a tie.  ATLAS_ERROR_NON_FINITE_LOGITS for a row that has
 * none.  The batch form marks such rows with -1. */
ATLAS_API atlas_status atlas_logits_argmax(atlas_logits *logits, size_t row, int32_t *token);
ATLAS_API atlas_status atlas_logits_argmax_batch(atlas_logits *logits, int32_t *tokens,
                                                 size_t capacity, size_t *num_tokens);

typedef struct atlas_device_rows {
    size_t struct_size;
    void *pointer;          /* of row 0, in device memory; the engine's */
    void *stream;           /* the work that writes the rows was queued here (CUstream) */
    uint64_t row_stride;    /* elements */
    int32_t element_bytes;  /* 4: float32, 2: bfloat16 */
    int32_t device;
} atlas_device_rows;

static inline void atlas_device_rows_init(atlas_device_rows *rows) {
    memset(rows, 0, sizeof *rows);
    rows->struct_size = sizeof *rows;
}

/* Where the rows lie on a GPU, valid until the handle is stale.  ATLAS_ERROR_CAPABILITY on a CPU. */
ATLAS_API atlas_status atlas_logits_get_device_rows(atlas_logits *logits, atlas_device_rows *rows);

/* The rows are the engine's and stay. */
ATLAS_API atlas_status atlas_logits_free(atlas_logits *logits);

/* ---- sampling ------------------------------------------------------------------------------ */

/* Parameters by name, with the meanings and ranges of the Python API's atlas.SamplingParams: numbers
 * ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", ...), true or
 * false ("ignore_eos"), words ("logprobs_mode"), JSON for those that take lists or mappings ("stop",
 * "stop_token_ids", "bad_words", "logit_bias", "dry_sequence_breakers"), and null for None.  The
 * default is greedy.  An unknown key, with the nearest name, and a value out of range are
 * ATLAS_ERROR_INVALID_ARGUMENT; combinations are checked when the parameters are used. */
ATLAS_API atlas_status atlas_sampling_create(atlas_sampling **sampling);
ATLAS_API atlas_status atlas_sampling_set(atlas_sampling *sampling, const char *key,
                                          const char *value);
ATLAS_API atlas_status atlas_sampling_set_integer(atlas_sampling *sampling, const char *key,
                                                  int64_t value);
ATLAS_API atlas_status atlas_sampling_set_number(atlas_sampling *sampling, const char *key,
                                                 double value);
ATLAS_API atlas_status atlas_sampling_free(atlas_sampling *sampling);

/* Chooses the tokens of one sample by hand.  Parameters are copied; a seed is made where none is set
 * (atlas_sampler_get_seed).  `prompt` counts for penalties and may be NULL with num_tokens 0.
 * Ends of the text (stop, max_tokens) are the caller's affair here. */
ATLAS_API atlas_status atlas_sampler_create(atlas_engine *engine, const atlas_sampling *sampling,
                                            const int32_t *prompt, size_t num_tokens,
                                            atlas_sampler **sampler);

typedef struct atlas_token_logprob {
    int32_t token;
    float logprob; /* natural logarithm */
} atlas_token_logprob;

/* Choose the token after a row of logits; the same row, parameters, seed and number of observed
 * tokens give the same one.  `mask` is NULL or (vocab_size + 31) / 32 words of which bit i % 32 of
 * word i / 32 allows id i.  `logprob`, which may be NULL, becomes the token's log-probability (NaN
 * unless "logprobs" is set).  The sampler does not remember the token: observe does. */
ATLAS_API atlas_status atlas_sampler_sample(atlas_sampler *sampler, atlas_logits *logits, size_t row,
                                            const uint32_t *mask, int32_t *token, float *logprob);

/* The log-probabilities of that sample's most probable tokens ("logprobs" of them). */
ATLAS_API atlas_status atlas_sampler_get_top(atlas_sampler *sampler, atlas_token_logprob *top,
                                             size_t capacity, size_t *num_top);

/* Append a token to what the sampler remembers, and forget all but the first `num_tokens` again. */
ATLAS_API atlas_status atlas_sampler_observe(atlas_sampler *sampler, int32_t token);
ATLAS_API atlas_status atlas_sampler_rewind(atlas_sampler *sampler, size_t num_tokens);
ATLAS_API atlas_status atlas_sampler_get_seed(atlas_sampler *sampler, uint64_t *seed);
ATLAS_API atlas_status atlas_sampler_free(atlas_sampler *sampler);

/* ---- beam search --------------------------------------------------------------------------- */

/* Parameters by name, with the meanings and ranges of the Python API's atlas.BeamParams:
 * "num_beams" (1 ... 16; 4), "max_tokens" (null: all that fit), "length_penalty" (1.0),
 * "early_stopping" (true, false, "never"), "no_repeat_ngram" (0: none), "num_return" (1).  An unknown
 * key, with the nearest name, and a value out of range are ATLAS_ERROR_INVALID_ARGUMENT;
 * combinations are checked when the parameters are used. */
ATLAS_API atlas_status atlas_beam_search_create(atlas_beam_search **beam_search);
ATLAS_API atlas_status atlas_beam_search_set(atlas_beam_search *beam_search, const char *key,
                                             const char *value);
ATLAS_API atlas_status atlas_beam_search_set_integer(atlas_beam_search *beam_search,
                                                     const char *key, int64_t value);
ATLAS_API atlas_status atlas_beam_search_set_number(atlas_beam_search *beam_search, const char *key,
                                                    double value);
ATLAS_API atlas_status atlas_beam_search_free(atlas_beam_search *beam_search);

/* ---- requests ------------------------------------------------------------------------------ */

/* A translation model (M2M100, NLLB) takes requests with two languages.  Its `text` or `tokens` are
 * the source without language tag and end token, which are added; nothing in a text becomes one.
 * It searches as `beam_search` says, or draws samples as `sampling` says: not both.  Other models
 * refuse languages and beam searches: ATLAS_ERROR_CAPABILITY. */
typedef struct atlas_request_params {
    size_t struct_size;
    const char *text;               /* a prompt as text, encoded with special tokens added; or ... */
    size_t text_len;
    const int32_t *tokens;          /* ... as ids: exactly one of the two */
    size_t num_tokens;
    const atlas_sampling *sampling; /* NULL: greedy, 128 tokens; a translation: beam search */
    void *user;                     /* handed back in events */
    int32_t priority;               /* lower runs first and is preempted last */
    int32_t reserved;
    const char *source_language;    /* a code such as "eng_Latn", NUL-terminated ... */
    const char *target_language;
    const atlas_beam_search *beam_search; /* NULL: four beams */
    int32_t source_tag;             /* ... or the id of a language's tag; neither: the default */
    int32_t target_tag;
} atlas_request_params;

static inline void atlas_request_params_init(atlas_request_params *params) {
    memset(params, 0, sizeof *params);
    params->struct_size = sizeof *params;
    params->text_len = ATLAS_NUL_TERMINATED;
}

/* Queue a request; never waits for a step.  What it asks is checked now; a fault while it runs ends
 * this request, with an event, never the engine.  Free the handle at any time; the request goes on,
 * and its events come.  ATLAS_ERROR_QUEUE_FULL: "max_waiting" requests wait for their first token. */
ATLAS_API atlas_status atlas_request_submit(atlas_engine *engine, const atlas_request_params *params,
                                            atlas_request **request);

/* Ask for the end of a request; its last event says ATLAS_FINISH_CANCELLED, within one chunk of a
 * prefill or one decode step.  Does nothing when it has ended.  Does not wait. */
ATLAS_API atlas_status atlas_request_cancel(atlas_request *request);
ATLAS_API atlas_status atlas_request_free(atlas_request *request);

/* Run one step of the requests in this thread and tell how many are unfinished.
 * ATLAS_ERROR_MODEL_BUSY after atlas_engine_start. */
ATLAS_API atlas_status atlas_engine_step(atlas_engine *engine, size_t *num_unfinished);

/* Let a thread of the engine run the steps, until stop, which waits for the step that runs.  Requests
 * stay.  Token-level calls take their turn between two steps. */
ATLAS_API atlas_status atlas_engine_start(atlas_engine *engine);
ATLAS_API atlas_status atlas_engine_stop(atlas_engine *engine);

/* Take the oldest event.  Waits up to `timeout_us` microseconds (0: not at all, negative: for ever)
 * while there is none.  Unless atlas_engine_start was called, the waiting thread runs the steps, the
 * last of which may end after the time is out, and does not wait without an unfinished request.
 * `event` as `logits` of forwards: NULL or a handle to reuse; without an event
 * in time *event becomes a handle that names none, or stays NULL.  Several threads may poll; each
 * event goes to one of them.  ATLAS_ERROR_CLOSED: the engine was freed while this waited. */
ATLAS_API atlas_status atlas_engine_poll(atlas_engine *engine, int64_t timeout_us,
                                         atlas_event **event);

/* A file descriptor that is readable while events wait; for select, poll and epoll only.  It is the
 * engine's, which closes it at its end: do not read or close it.  Somebody has to run the steps:
 * atlas_engine_start, or atlas_engine_step. */
ATLAS_API atlas_status atlas_engine_get_wait_fd(atlas_engine *engine, int32_t *fd);

enum {
    ATLAS_FINISH_NONE = 0, /* goes on */
    ATLAS_FINISH_STOP = 1, /* an end token or stop string */
    ATLAS_FINISH_LENGTH = 2,
    ATLAS_FINISH_CANCELLED = 3,
    ATLAS_FINISH_ERROR = 4 /* `error` and `error_message` say why */
};

/* Texts and arrays are the event's and valid until it is reused or freed. */
typedef struct atlas_event_info {
    size_t struct_size;
    atlas_request *request; /* NULL once the caller has freed it, and from atlas_engine_generate */
    void *user;             /* of the request's parameters */
    const int32_t *tokens;  /* new ones */
    size_t num_tokens;
    const char *text;       /* what became certain: whole characters, NUL-terminated */
    size_t text_len;
    const atlas_token_logprob *logprobs; /* of `tokens`, if "logprobs" is set; else NULL */
    const atlas_token_logprob *top;      /* num_top for each of `tokens` */
    size_t num_top;
    int32_t sample;         /* which of the request's n samples or num_return hypotheses */
    int32_t finish_reason;  /* of the sample */
    int32_t stop_token;     /* the end token, or -1 */
    int32_t is_last;        /* 1: the request has ended, no event of it follows */
    int32_t reserved;
    atlas_status error;
    const char *stop_text;     /* the stop string, or NULL */
    const char *error_message; /* or NULL */
    uint64_t prompt_tokens;    /* usage, in the last event; else 0 */
    uint64_t cached_tokens;    /* of the prompt, taken from a prefix cache */
    uint64_t completion_tokens; /* of all samples, end tokens included */
    double score; /* of a beam search's hypothesis, when it ends; else NaN */
} atlas_event_info;

static inline void atlas_event_info_init(atlas_event_info *info) {
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

/* ATLAS_ERROR_STALE_HANDLE: the handle names no event. */
ATLAS_API atlas_status atlas_event_get_info(atlas_event *event, atlas_event_info *info);
ATLAS_API atlas_status atlas_event_free(atlas_event *event);

/* New tokens of atlas_engine_generate: `event` is for atlas_event_get_info during the callback and is
 * not freed by it.  Return 0 to go on; anything else cancels. */
typedef int32_t (*atlas_generate_callback)(void *user, atlas_event *event);

/* Run one request of one sample (no "n", "num_return", "prompt_logprobs") to its end, among the
 * others that are queued.  `callback`, which may be NULL, gets each step's news
 * with params->user; `result`, which may be NULL, the whole as one event (NULL or a handle to reuse).
 * ATLAS_OK too when the callback cancels it (ATLAS_FINISH_CANCELLED).  A request that fails while it
 * runs returns its error, and the result holds what there was until then. */
ATLAS_API atlas_status atlas_engine_generate(atlas_engine *engine,
                                             const atlas_request_params *params,
                                             atlas_generate_callback callback,
                                             atlas_event **result);

/* ---- translation --------------------------------------------------------------------------- */

/* The codes of a translation model's languages, sorted, one a line.  ATLAS_ERROR_TOKENIZER: it came
 * without a tokenizer, and languages are ids of tags. */
ATLAS_API atlas_status atlas_engine_get_languages(atlas_engine *engine, char *buffer,
                                                  size_t capacity, size_t *length);

/* The languages, as codes, of requests that name none and of sequences that are driven by hand. */
ATLAS_API atlas_status atlas_engine_set_default_languages(atlas_engine *engine,
                                                          const char *source_language,
                                                          const char *target_language);

/* Translate NUL-terminated texts, all of them together, and wait.  `beam_search` may be NULL.
 * `results` has `num_results` places, as many as texts times "num_return" (1 if not set), each NULL
 * or a handle to reuse: results[i * num_return + j] becomes the j-th best translation of texts[i],
 * as one event.  Languages may be NULL where defaults
 * are set.  A text that is refused fails the call, before anything runs.  One that fails while
 * it runs returns its error, and all results are set. */
ATLAS_API atlas_status atlas_translate(atlas_engine *engine, const char *const *texts,
                                       size_t num_texts, const char *source_language,
                                       const char *target_language,
                                       const atlas_beam_search *beam_search, atlas_event **results,
                                       size_t num_results);

#ifdef __cplusplus
}
#endif

#endif /* ATLAS_H */
