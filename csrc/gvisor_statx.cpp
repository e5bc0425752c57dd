// Debian 12's gVisor (2022) refuses AT_NO_AUTOMOUNT, which changes nothing inside a sandbox, and
// `ls` and `stat` of coreutils always pass it. Preloaded there: statx without the flag.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" int statx(int directory, const char* path, int flags, unsigned mask,
                     struct statx* result) noexcept {
  return syscall(SYS_statx, directory, path, flags & ~AT_NO_AUTOMOUNT, mask, result);
}
