/* Atlas: an embeddable LLM inference engine.  C ABI, version macros only so far. */
#ifndef ATLAS_H
#define ATLAS_H

#define ATLAS_VERSION_MAJOR 0
#define ATLAS_VERSION_MINOR 1
#define ATLAS_VERSION_PATCH 0
#define ATLAS_VERSION "0.1.0"

#endif /* ATLAS_H */
