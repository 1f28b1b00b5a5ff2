/* Python without linking to it: every function comes from the libpython that was chosen at run time,
 * or from the one that this process runs already. */
#include <Python.h>
#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

/* Name, result, parameters of what is used. */
#define PYTHON_FUNCTIONS(F)                                                                        \
    F(Py_IsInitialized, int, (void))                                                               \
    F(Py_GetVersion, const char *, (void))                                                         \
    F(PyPreConfig_InitIsolatedConfig, void, (PyPreConfig *))                                       \
    F(Py_PreInitialize, PyStatus, (const PyPreConfig *))                                           \
    F(PyConfig_InitIsolatedConfig, void, (PyConfig *))                                             \
    F(PyConfig_SetBytesString, PyStatus, (PyConfig *, wchar_t **, const char *))                   \
    F(PyConfig_Clear, void, (PyConfig *))                                                          \
    F(Py_DecodeLocale, wchar_t *, (const char *, size_t *))                                        \
    F(PyMem_RawFree, void, (void *))                                                               \
    F(PyWideStringList_Append, PyStatus, (PyWideStringList *, const wchar_t *))                    \
    F(Py_InitializeFromConfig, PyStatus, (const PyConfig *))                                       \
    F(PyStatus_Exception, int, (PyStatus))                                                         \
    F(PyGILState_Ensure, PyGILState_STATE, (void))                                                 \
    F(PyGILState_Release, void, (PyGILState_STATE))                                                \
    F(PyGILState_GetThisThreadState, PyThreadState *, (void))                                      \
    F(PyEval_SaveThread, PyThreadState *, (void))                                                  \
    F(PyEval_RestoreThread, void, (PyThreadState *))                                               \
    F(PyThreadState_GetInterpreter, PyInterpreterState *, (PyThreadState *))                       \
    F(PyInterpreterState_Main, PyInterpreterState *, (void))                                       \
    F(PyDict_New, PyObject *, (void))                                                              \
    F(PyDict_GetItemString, PyObject *, (PyObject *, const char *))                                \
    F(PyRun_StringFlags, PyObject *, (const char *, int, PyObject *, PyObject *, PyCompilerFlags *))\
    F(PyList_New, PyObject *, (Py_ssize_t))                                                        \
    F(PyList_Append, int, (PyObject *, PyObject *))                                                \
    F(PyUnicode_DecodeFSDefault, PyObject *, (const char *))                                       \
    F(PyUnicode_AsUTF8, const char *, (PyObject *))                                                \
    F(PyObject_CallFunction, PyObject *, (PyObject *, const char *, ...))                          \
    F(PyErr_Clear, void, (void))                                                                   \
    F(Py_DecRef, void, (PyObject *))

#define DECLARE(name, result, parameters) result(*name) parameters;
static struct {
    PYTHON_FUNCTIONS(DECLARE)
    PyThreadState *(*current)(void); /* of the process or thread, without a check */
} py;

/* Runs once, as the Python side's first code. It returns an error's text, or what was loaded. */
static const char BOOTSTRAP[] =
    "def start(first, own, sites, table, size, fingerprint, owned):\n"
    "    try:\n"
    "        import site, sys\n"
    "        sys.path[:0] = [path for path in first if path not in sys.path]\n"
    "        for folder in sites:\n"
    "            site.addsitedir(folder)\n"
    "        if own and 'atlas' not in sys.modules:\n"
    "            from importlib.util import find_spec\n"
    "            if find_spec('atlas') is None:\n"
    "                sys.path.append(own)\n"
    "        from atlas.capi import attach\n"
    "        return True, attach(table, size, fingerprint, owned)\n"
    "    except BaseException as error:\n"
    "        text = f'{type(error).__name__}: {error}'\n"
    "        cause = error.__cause__ or error.__context__\n"
    "        if cause is not None:\n"
    "            text += f' ({type(cause).__name__}: {cause})'\n"
    "        return False, text\n"
    "def text_of(result):\n"
    "    return result[1].encode('utf-8', 'replace').decode()\n"
    "def succeeded(result):\n"
    "    return 'yes' if result[0] else ''\n";

static int bind(void *library, atlas_text *error) {
#define BIND(name, result, parameters)                                                             \
    *(void **)&py.name = dlsym(library, #name);                                                    \
    if (py.name == NULL) {                                                                         \
        atlas_text_add(error, "libpython has no function " #name);                                 \
        return 0;                                                                                  \
    }
    BIND(Py_GetVersion, , )
    const char *version = py.Py_GetVersion();
    const size_t length = strlen(ATLAS_PYTHON_VERSION);
    if (strncmp(version, ATLAS_PYTHON_VERSION, length) != 0 || version[length] != '.') {
        atlas_text_add(error, "this process has Python %.*s; this library needs " ATLAS_PYTHON_VERSION,
                       (int)strcspn(version, " "), version);
        return 0;
    }
    PYTHON_FUNCTIONS(BIND)
    *(void **)&py.current = dlsym(library, "PyThreadState_GetUnchecked");
    if (py.current == NULL) *(void **)&py.current = dlsym(library, "_PyThreadState_UncheckedGet");
    return 1;
}

/* A libpython that some other library has loaded, perhaps for itself alone. */
static int find_loaded(struct dl_phdr_info *info, size_t size, void *opaque) {
    (void)size;
    const char *name = strrchr(info->dlpi_name, '/');
    name = name == NULL ? info->dlpi_name : name + 1;
    if (strncmp(name, "libpython3.", 11) != 0) return 0;
    void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) return 0;
    int (*is_initialized)(void);
    *(void **)&is_initialized = dlsym(library, "Py_IsInitialized");
    if (is_initialized != NULL && is_initialized()) {
        /* Extension modules need its symbols in the global scope. */
        *(void **)opaque = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_GLOBAL | RTLD_NOLOAD);
        return 1;
    }
    dlclose(library);
    return 0;
}

atlas_presence atlas_python_presence(atlas_text *error) {
    int (*is_initialized)(void);
    void *library = NULL;
    *(void **)&is_initialized = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    if (is_initialized == NULL || !is_initialized()) {
        dl_iterate_phdr(find_loaded, &library);
        if (library == NULL) return ATLAS_PYTHON_ABSENT;
    } else {
        library = RTLD_DEFAULT;
    }
    return bind(library, error) ? ATLAS_PYTHON_GUEST : ATLAS_PYTHON_UNUSABLE;
}

static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int is_library(const struct dirent *entry) { return strstr(entry->d_name, ".so") != NULL; }

/* A bundle brings libraries that extension modules ask for by their sonames; once they are loaded,
 * the dynamic linker takes these. Their file names are in the order of dependence. */
static void preload(const char *folder) {
    struct dirent **entries;
    const int count = scandir(folder, &entries, is_library, by_name);
    for (int i = 0; i < count; ++i) {
        char path[PATH_MAX + 256];
        if (snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name) < (int)sizeof path)
            dlopen(path, RTLD_LAZY | RTLD_LOCAL);
        free(entries[i]);
    }
    if (count >= 0) free(entries);
}

static PyStatus append(PyWideStringList *list, const char *format, const char *folder) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, format, folder);
    wchar_t *wide = py.Py_DecodeLocale(path, NULL);
    const PyStatus status = py.PyWideStringList_Append(list, wide == NULL ? L"" : wide);
    py.PyMem_RawFree(wide);
    return status;
}

int atlas_python_start(const atlas_python *found, atlas_text *error) {
    if (found->preload[0] != '\0') preload(found->preload);
    void *library = dlopen(found->libpython, RTLD_LAZY | RTLD_GLOBAL);
    if (library == NULL) {
        atlas_text_add(error, "%s", dlerror());
        return 0;
    }
    if (!bind(library, error)) return 0;

    PyPreConfig before;
    py.PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1; /* whatever the locale of the host */
    PyStatus status = py.Py_PreInitialize(&before);
    PyConfig config;
    py.PyConfig_InitIsolatedConfig(&config);
    config.install_signal_handlers = 0;
    config.pathconfig_warnings = 0;
    config.site_import = 0; /* its failure would be printed, and nothing of it is needed */
    config.module_search_paths_set = 1;
    char executable[PATH_MAX + 16];
    snprintf(executable, sizeof executable, "%s/bin/python3", found->home);
#define STEP(call)                                                                                 \
    if (!py.PyStatus_Exception(status)) status = call
    STEP(py.PyConfig_SetBytesString(&config, &config.home, found->base));
    STEP(py.PyConfig_SetBytesString(&config, &config.program_name, executable));
    STEP(py.PyConfig_SetBytesString(&config, &config.executable, executable));
    STEP(append(&config.module_search_paths, "%s", found->standard));
    STEP(append(&config.module_search_paths, "%s/lib-dynload", found->standard));
    STEP(py.Py_InitializeFromConfig(&config));
#undef STEP
    py.PyConfig_Clear(&config);
    if (!py.PyStatus_Exception(status)) return 1;
    atlas_text_add(error, "Python in %s did not start: %s", found->base,
                   status.err_msg != NULL ? status.err_msg : "it asked to exit");
    return 0;
}

static PyObject *path_list(const char *const *paths, size_t count) {
    PyObject *list = py.PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; ++i) {
        PyObject *path = py.PyUnicode_DecodeFSDefault(paths[i]);
        if (path != NULL) {
            py.PyList_Append(list, path);
            py.Py_DecRef(path);
        }
    }
    return list;
}

/* Call one of the bootstrap's functions that return a string. */
static void text_from(PyObject *names, const char *function, PyObject *result, atlas_text *text) {
    PyObject *found = py.PyObject_CallFunction(py.PyDict_GetItemString(names, function), "(O)", result);
    const char *chars = found == NULL ? NULL : py.PyUnicode_AsUTF8(found);
    if (chars != NULL) atlas_text_add(text, "%s", chars);
    py.Py_DecRef(found);
}

int atlas_python_attach(const atlas_python *found, const char *const *paths, size_t num_paths,
                        atlas_functions *table, atlas_text *error, atlas_text *report) {
    char own[PATH_MAX];
    const char *sites[ATLAS_MAX_SITES];
    const int num_sites = found == NULL ? 0 : found->num_sites;
    for (int i = 0; i < num_sites; ++i) sites[i] = found->sites[i];
    atlas_own_site(own);

    PyObject *names = py.PyDict_New(), *result = NULL;
    PyObject *done = names == NULL
                         ? NULL
                         : py.PyRun_StringFlags(BOOTSTRAP, Py_file_input, names, names, NULL);
    if (done != NULL) {
        PyObject *first = path_list(paths, num_paths), *others = path_list(sites, (size_t)num_sites);
        if (first != NULL && others != NULL)
            result = py.PyObject_CallFunction(
                py.PyDict_GetItemString(names, "start"), "(OsOKnsi)", first, own, others,
                (unsigned long long)(uintptr_t)table, (Py_ssize_t)sizeof *table, ATLAS_FINGERPRINT,
                found != NULL);
        py.Py_DecRef(first);
        py.Py_DecRef(others);
    }
    atlas_text succeeded = {NULL, 0};
    if (result != NULL) {
        text_from(names, "succeeded", result, &succeeded);
        text_from(names, "text_of", result, succeeded.chars != NULL && succeeded.length ? report : error);
    }
    if (result == NULL) atlas_text_add(error, "Python failed before Atlas could be imported");
    const int ok = succeeded.length > 0;
    atlas_text_clear(&succeeded);
    py.PyErr_Clear();
    py.Py_DecRef(done);
    py.Py_DecRef(result);
    py.Py_DecRef(names);
    return ok;
}

void atlas_python_release_gil(void) { py.PyEval_SaveThread(); }

int atlas_python_acquire(void) { return (int)py.PyGILState_Ensure(); }

void atlas_python_give_back(int state) { py.PyGILState_Release((PyGILState_STATE)state); }

void *atlas_python_pause(void) { return py.PyEval_SaveThread(); }

void atlas_python_resume(void *state) { py.PyEval_RestoreThread(state); }

int atlas_python_in_subinterpreter(void) {
    const PyInterpreterState *main_one = py.PyInterpreterState_Main();
    PyThreadState *own = py.PyGILState_GetThisThreadState();
    if (own != NULL && py.PyThreadState_GetInterpreter(own) != main_one) return 1;
    /* A thread of the main interpreter may have switched to another one's state. Up to 3.11 the
     * current state is that of whichever thread holds the GIL, so the thread is compared. */
    PyThreadState *current = py.current == NULL ? NULL : py.current();
    return current != NULL && py.PyThreadState_GetInterpreter(current) != main_one &&
           current->thread_id == (unsigned long)pthread_self();
}
