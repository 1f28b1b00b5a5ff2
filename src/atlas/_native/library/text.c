/* Text that grows. When memory runs out, what is added is lost; it serves messages only. */
#include <stdio.h>
#include <stdlib.h>

#include "library.h"

void atlas_text_add(atlas_text *text, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    const int added = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *chars = added < 0 ? NULL : realloc(text->chars, text->length + (size_t)added + 1);
    if (chars != NULL) {
        vsnprintf(chars + text->length, (size_t)added + 1, format, again);
        text->chars = chars;
        text->length += (size_t)added;
    }
    va_end(again);
}

void atlas_text_clear(atlas_text *text) {
    free(text->chars);
    *text = (atlas_text){NULL, 0};
}
