/* A clock that jumps: every second look at the time of day is a day back. To be preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    static unsigned looks;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now);
    if (which == CLOCK_REALTIME && looks++ % 2) now->tv_sec -= 86400;
    return code;
}
