/* Choose the Python to run: the caller's, $ATLAS_HOME's, the one around this file, or the one that
 * built it. Files decide, never PATH or the working directory. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "library.h"

#define LIB_PYTHON "lib/python" ATLAS_PYTHON_VERSION

static int exists(const char *path) {
    struct stat status;
    return stat(path, &status) == 0;
}

/* Join into `out`; 0 when it does not fit. */
__attribute__((format(printf, 2, 3))) static int join(char out[PATH_MAX], const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(out, PATH_MAX, format, arguments);
    va_end(arguments);
    return length >= 0 && length < PATH_MAX;
}

static int cut_last(char *path) {
    char *slash = strrchr(path, '/');
    if (slash == NULL) return 0;
    *slash = '\0';
    return 1;
}

static const char *last_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/* The folder of this library's file, without links. */
static int own_folder(char folder[PATH_MAX]) {
    Dl_info info;
    if (dladdr((void *)(uintptr_t)atlas_version, &info) == 0 || info.dli_fname == NULL) return 0;
    return realpath(info.dli_fname, folder) != NULL && cut_last(folder);
}

void atlas_own_site(char site[PATH_MAX]) {
    char folder[PATH_MAX], file[PATH_MAX];
    site[0] = '\0';
    if (!own_folder(folder) || strcmp(last_of(folder), "lib") != 0) return;
    cut_last(folder);
    /* A bundle may be called atlas, too. */
    if (strcmp(last_of(folder), "atlas") != 0 || !join(file, "%s/__init__.py", folder)) return;
    if (!exists(file) || !cut_last(folder)) return;
    join(site, "%s", folder);
}

static void add_site(atlas_python *found, const char *site) {
    for (int i = 0; i < found->num_sites; ++i)
        if (strcmp(found->sites[i], site) == 0) return;
    if (found->num_sites < ATLAS_MAX_SITES && exists(site))
        join(found->sites[found->num_sites++], "%s", site);
}

/* The value of a key of pyvenv.cfg, or 0. */
static int environment_value(const char *file, const char *key, char value[PATH_MAX]) {
    FILE *stream = fopen(file, "re");
    if (stream == NULL) return 0;
    char line[PATH_MAX + 64];
    int found = 0;
    while (!found && fgets(line, sizeof line, stream) != NULL) {
        char *equals = strchr(line, '=');
        const size_t length = strlen(key);
        if (equals == NULL || strncmp(line, key, length) != 0) continue;
        if (strspn(line + length, " \t") != (size_t)(equals - line) - length) continue;
        char *start = equals + 1 + strspn(equals + 1, " \t");
        start[strcspn(start, "\r\n")] = '\0';
        found = join(value, "%s", start);
    }
    fclose(stream);
    return found;
}

static int find_libpython(atlas_python *found) {
    static const char *const folders[] = {"lib", "lib64", "lib/" ATLAS_MULTIARCH};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; ++i) {
        if (join(found->libpython, "%s/%s/%s", found->base, folders[i], ATLAS_LIBPYTHON) &&
            exists(found->libpython))
            return 1;
    }
    return strcmp(found->base, ATLAS_BUILD_BASE) == 0 &&
           join(found->libpython, "%s/%s", ATLAS_LIBPYTHON_DIR, ATLAS_LIBPYTHON) &&
           exists(found->libpython);
}

static void add_installation_sites(atlas_python *found, const char *prefix) {
    static const char *const folders[] = {
        LIB_PYTHON "/site-packages",
        "local/" LIB_PYTHON "/dist-packages", /* Debian's */
        "lib/python3/dist-packages",
    };
    char site[PATH_MAX];
    for (size_t i = 0; i < sizeof folders / sizeof *folders; ++i)
        if (join(site, "%s/%s", prefix, folders[i])) add_site(found, site);
}

static int try_home(const char *how, const char *path, atlas_python *found, atlas_text *report) {
    char file[PATH_MAX], value[PATH_MAX];
    atlas_text_add(report, "tried %s: %s", how, path);
    if (realpath(path, found->home) == NULL) {
        atlas_text_add(report, ": no such folder\n");
        return 0;
    }
    join(found->base, "%s", found->home);
    int uses_base = 1;
    if (join(file, "%s/pyvenv.cfg", found->home) && exists(file)) {
        if (!environment_value(file, "home", value) || realpath(value, found->base) == NULL) {
            atlas_text_add(report, ": pyvenv.cfg names no existing home\n");
            return 0;
        }
        cut_last(found->base); /* home is the bin folder */
        uses_base = environment_value(file, "include-system-site-packages", value) &&
                    strcmp(value, "true") == 0;
    }
    if (!join(file, "%s/" LIB_PYTHON "/os.py", found->base) || !exists(file)) {
        atlas_text_add(report, ": no Python " ATLAS_PYTHON_VERSION " (no %s)\n", file);
        return 0;
    }
    join(found->standard, "%s/" LIB_PYTHON, found->base);
    if (!find_libpython(found)) {
        atlas_text_add(report, ": no " ATLAS_LIBPYTHON " under %s/lib; this Python was built without "
                               "a shared library\n", found->base);
        return 0;
    }
    found->how = how;
    if (join(file, "%s/" LIB_PYTHON "/site-packages", found->home)) add_site(found, file);
    if (uses_base) add_installation_sites(found, found->base);
    found->preload[0] = '\0';
    if (join(file, "%s/lib/atlas-system", found->home) && exists(file))
        join(found->preload, "%s", file);
    atlas_text_add(report, ": chosen\n");
    return 1;
}

/* Beside this file: <prefix>/lib/libatlas_llm.so.0, or <prefix>/lib/pythonX.Y/<site>/atlas/lib/... */
static int try_own(atlas_python *found, atlas_text *report) {
    char folder[PATH_MAX], file[PATH_MAX];
    if (!own_folder(folder)) return 0;
    if (found->num_sites == 0) { /* not inside the package */
        cut_last(folder);
        return join(file, "%s/" LIB_PYTHON, folder) && exists(file) &&
               try_home("next to the library", folder, found, report);
    }
    for (int up = 0; up < 5; ++up) /* lib, atlas, site-packages, pythonX.Y, lib */
        if (!cut_last(folder)) return 0;
    if (!join(file, "%s/" LIB_PYTHON, folder) || strncmp(found->sites[0], file, strlen(file)) != 0)
        return 0; /* a source tree, say */
    return try_home("around the library", folder, found, report);
}

int atlas_find_python(const char *home, atlas_python *found, atlas_text *report) {
    memset(found, 0, sizeof *found);
    atlas_own_site(found->sites[0]);
    found->num_sites = found->sites[0][0] != '\0';
    if (home != NULL) return try_home("the home given", home, found, report);
    const char *variable = getenv("ATLAS_HOME");
    if (variable != NULL && variable[0] != '\0')
        return try_home("$ATLAS_HOME", variable, found, report);
    return try_own(found, report) ||
           try_home("where it was built", ATLAS_BUILD_PREFIX, found, report) ||
           try_home("the Python that built it", ATLAS_BUILD_BASE, found, report);
}
