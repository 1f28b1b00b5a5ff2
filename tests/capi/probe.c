/* Opens the library as a plugin does, with RTLD_LOCAL, and does what its arguments say:
 *
 *     probe LIBRARY [init HOME] [path FOLDER] [describe] [has NAME] [all NAME ...]
 *
 * `all` calls every function named with zeros for arguments. Each call prints a line.
 */
#include <atlas.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef atlas_status (*any_function)(void *, void *, void *, void *, void *, void *, void *, void *,
                                     void *);

static void *library;

static void *find(const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) printf("%s absent\n", name);
    return found;
}

#define FUNCTION(name) (*(__typeof__(&name) *)&(void *){find(#name)})

static void show(const char *what, atlas_status status) {
    printf("%s %s %s\n", what, FUNCTION(atlas_status_name)(status),
           status == ATLAS_OK ? "" : FUNCTION(atlas_error_message)());
}

int main(int argc, char **argv) {
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("dlopen %s\n", dlerror());
        return 1;
    }
    for (int i = 2; i < argc; ++i) {
        if (strcmp(argv[i], "init") == 0) {
            show("init", FUNCTION(atlas_runtime_init)(argv[++i], NULL, 0));
        } else if (strcmp(argv[i], "path") == 0) {
            const char *paths[] = {argv[++i]};
            show("path", FUNCTION(atlas_runtime_init)(NULL, paths, 1));
        } else if (strcmp(argv[i], "describe") == 0) {
            static char text[1 << 16];
            size_t length;
            show("describe", FUNCTION(atlas_runtime_describe)(text, sizeof text, &length));
            printf("%s", text);
        } else if (strcmp(argv[i], "has") == 0) {
            const int has = (int)FUNCTION(atlas_has)(argv[++i]);
            printf("has %d %s\n", has, FUNCTION(atlas_error_message)());
        } else if (strcmp(argv[i], "all") == 0) {
            while (++i < argc) {
                any_function function;
                *(void **)&function = find(argv[i]);
                show(argv[i], function(0, 0, 0, 0, 0, 0, 0, 0, 0));
            }
        }
    }
    dlclose(library);
    printf("end\n");
    return 0;
}
