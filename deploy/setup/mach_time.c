/* mlx-rs seeds its default random state from Darwin's coarse clock on every platform; elsewhere this is the same
 * clock: nanoseconds since boot, cheap and coarse.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <time.h>

uint64_t mach_approximate_time(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
