/* What the files of libatlas_llm.so share; nothing here is exported. */
#ifndef ATLAS_LIBRARY_H
#define ATLAS_LIBRARY_H

#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "atlas.h"
#include "atlas_dispatch.h"

/* ---- text that grows ----------------------------------------------------------------------- */

typedef struct {
    char *chars; /* NUL-terminated, or NULL while empty or when memory ran out */
    size_t length;
} atlas_text;

__attribute__((format(printf, 2, 3))) void atlas_text_add(atlas_text *text, const char *format, ...);
void atlas_text_clear(atlas_text *text);

/* ---- finding Python (find.c) --------------------------------------------------------------- */

enum { ATLAS_MAX_SITES = 6 };

typedef struct {
    const char *how;              /* which rule chose it */
    char home[PATH_MAX];          /* as chosen: an installation, environment or bundle */
    char base[PATH_MAX];          /* the installation that home belongs to */
    char standard[PATH_MAX];      /* its standard library */
    char libpython[PATH_MAX];
    char sites[ATLAS_MAX_SITES][PATH_MAX]; /* folders of packages, the library's own first */
    int num_sites;
    char preload[PATH_MAX];       /* a bundle's copies of system libraries, or "" */
} atlas_python;

/* Choose a Python; 0 when there is none. `report` gets what was tried and what was chosen. */
int atlas_find_python(const char *home, atlas_python *found, atlas_text *report);

/* The folder of packages that this library's own file lies in, or "". */
void atlas_own_site(char site[PATH_MAX]);

/* ---- running Python (python.c) ------------------------------------------------------------- */

typedef enum {
    ATLAS_PYTHON_ABSENT,   /* none runs in this process */
    ATLAS_PYTHON_GUEST,    /* one runs that somebody else started */
    ATLAS_PYTHON_UNUSABLE  /* one runs that this library cannot use; the message says why */
} atlas_presence;

atlas_presence atlas_python_presence(atlas_text *error);

/* Start the chosen Python, in a thread that then holds the GIL; 0 on failure. */
int atlas_python_start(const atlas_python *found, atlas_text *error);

/* Import the Python side and let it fill the table; the GIL is held. 0 on failure. */
int atlas_python_attach(const atlas_python *found, const char *const *paths, size_t num_paths,
                        atlas_functions *table, atlas_text *error, atlas_text *report);

void atlas_python_release_gil(void); /* for good, by the thread that started it */
int atlas_python_acquire(void);      /* and the state to give back */
void atlas_python_give_back(int state);
void *atlas_python_pause(void); /* let go of a GIL that is held, to take it again later */
void atlas_python_resume(void *state);

/* Whether the calling thread runs in another interpreter than the main one. */
int atlas_python_in_subinterpreter(void);

/* ---- calls (library.c) --------------------------------------------------------------------- */

int atlas_call_begin(atlas_call *call);
atlas_status atlas_call_end(const atlas_call *call);

#endif
