// Tries, from inside a sandbox, what must not succeed, and says what the kernel answered.
//
//   probe kernel | sockets | reach PORT HOST... | unix PATH... | abstract NAME
//   probe talk HOST PORT TEXT... | listen PORT | overwrite PATH | tty
//   probe memory BYTES | orphans COUNT | zombies COUNT | files DIRECTORY COUNT | fill PATH BYTES
//   probe sparse PATH BYTES | spin THREADS SECONDS
//
// One line for each attempt: its name, and "ok" or the name of the error.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

const char* answer(long result) {
  if (result >= 0) return "ok";
  const char* name = strerrorname_np(errno);
  return name ? name : "unknown";
}

void say(const char* name, long result) {
  printf("%s %s\n", name, answer(result));
  fflush(stdout);
}

// In a child, so that what does succeed changes nothing for the attempts after it.
void attempt(const char* name, const std::function<long()>& act) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    say(name, act());
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) printf("%s signal%d\n", name, WTERMSIG(status));
}

long call(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0) {
  return syscall(number, a, b, c, d, e);
}

long text(const char* value) { return reinterpret_cast<long>(value); }

long clone_with(unsigned long flags) {
  long pid = syscall(SYS_clone, flags | SIGCHLD, nullptr, nullptr, nullptr, nullptr);
  if (pid == 0) _exit(0);
  return pid;
}

long clone3_with(uint64_t flags) {
  struct {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
  } arguments{flags, 0, 0, 0, SIGCHLD, 0, 0, 0};
  long pid = syscall(SYS_clone3, &arguments, sizeof arguments);
  if (pid == 0) _exit(0);
  return pid;
}

long enter(const char* path) {
  int fd = open(path, O_RDONLY);
  return fd < 0 ? fd : setns(fd, 0);
}

void try_namespaces() {
  attempt("unshare_user", [] { return unshare(CLONE_NEWUSER); });
  attempt("unshare_mount", [] { return unshare(CLONE_NEWNS); });
  attempt("unshare_net", [] { return unshare(CLONE_NEWNET); });
  attempt("unshare_user_mount", [] { return unshare(CLONE_NEWUSER | CLONE_NEWNS); });
  attempt("clone_user", [] { return clone_with(CLONE_NEWUSER); });
  attempt("clone3_user", [] { return clone3_with(CLONE_NEWUSER); });
  attempt("setns_mount", [] { return enter("/proc/1/ns/mnt"); });
  attempt("setns_user", [] { return enter("/proc/1/ns/user"); });
  attempt("mount_tmpfs", [] { return mount("x", "/tmp", "tmpfs", 0, nullptr); });
  attempt("mount_proc", [] { return mount("x", "/tmp", "proc", 0, nullptr); });
  attempt("mount_bind", [] { return mount("/usr", "/tmp", nullptr, MS_BIND, nullptr); });
  attempt("remount", [] { return mount("", "/usr", nullptr, MS_REMOUNT | MS_BIND, nullptr); });
  attempt("umount", [] { return umount2("/proc", MNT_DETACH); });
  attempt("fsopen", [] { return call(SYS_fsopen, text("tmpfs")); });
  attempt("open_tree", [] { return call(SYS_open_tree, AT_FDCWD, text("/"), 1); });
  attempt("pivot_root", [] { return call(SYS_pivot_root, text("/tmp"), text("/tmp")); });
  attempt("chroot", [] { return chroot("/tmp"); });
}

void try_privileges() {
  attempt("mknod_null", [] { return mknod("/tmp/null", S_IFCHR | 0666, makedev(1, 3)); });
  attempt("mknod_disk", [] { return mknod("/tmp/disk", S_IFBLK | 0666, makedev(254, 0)); });
  attempt("chown", [] {
    int fd = open("/tmp/owned", O_CREAT | O_WRONLY, 0600);
    return fd < 0 ? 0 : fchown(fd, 4242, 4242);
  });
  attempt("setuid_other", [] { return call(SYS_setuid, 4242); });
  attempt("setgroups", [] {
    gid_t group = 4242;
    return call(SYS_setgroups, 1, reinterpret_cast<long>(&group));
  });
  attempt("capset", [] {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2] = {{~0U, ~0U, 0}, {0x1ff, 0x1ff, 0}};
    return call(SYS_capset, reinterpret_cast<long>(&header), reinterpret_cast<long>(data));
  });
  attempt("nice", [] { return setpriority(PRIO_PROCESS, 0, -20); });
  attempt("realtime", [] {
    sched_param parameters{50};
    return static_cast<long>(sched_setscheduler(0, SCHED_FIFO, &parameters));
  });
  attempt("raise_limit", [] {
    rlimit limit{1 << 30, 1 << 30};
    return static_cast<long>(setrlimit(RLIMIT_NPROC, &limit));
  });
  attempt("clock", [] {
    timespec value{1, 0};
    return static_cast<long>(clock_settime(CLOCK_REALTIME, &value));
  });
  attempt("adjtime", [] {
    timex value{};
    value.modes = ADJ_OFFSET;
    return static_cast<long>(adjtimex(&value));
  });
  attempt("hostname", [] { return sethostname("pwned", 5); });
  attempt("reboot", [] { return call(SYS_reboot, 0xfee1dead, 672274793, 0); });
  attempt("module", [] { return call(SYS_init_module, text("x"), 1, text("")); });
  attempt("kexec", [] { return call(SYS_kexec_load, 0, 0, 0, 0); });
  attempt("swapon", [] { return call(SYS_swapon, text("/tmp/x"), 0); });
  attempt("kernel_log", [] {
    char line[64];
    return call(SYS_syslog, 3, text(line), sizeof line);
  });
  attempt("handle", [] {
    struct { unsigned bytes; int type; char data[8]; } handle{8, 1, {}};
    return call(SYS_open_by_handle_at, AT_FDCWD, reinterpret_cast<long>(&handle), O_RDONLY);
  });
}

void try_kernel_surface() {
  static char memory[512];
  long zeros = reinterpret_cast<long>(memory);
  attempt("keyctl", [] { return call(SYS_keyctl, 0, -3, 1); });
  attempt("add_key", [] { return call(SYS_add_key, text("user"), text("k"), text("v"), 1, -3); });
  attempt("bpf", [=] { return call(SYS_bpf, 0, zeros, 72); });
  attempt("io_uring", [=] { return call(SYS_io_uring_setup, 4, zeros); });
  attempt("userfaultfd", [] { return call(SYS_userfaultfd, 1); });
  attempt("perf", [=] { return call(SYS_perf_event_open, zeros, 0, -1, -1, 0); });
  attempt("fanotify", [] { return call(SYS_fanotify_init, 0, O_RDONLY); });
  attempt("ptrace_init", [] { return ptrace(PTRACE_ATTACH, 1, 0, 0); });
  attempt("ptrace_keeper", [] { return ptrace(PTRACE_ATTACH, getppid() - 1, 0, 0); });
  attempt("read_init", [=] {
    iovec mine{memory, 8}, theirs{reinterpret_cast<void*>(0x400000), 8};
    return process_vm_readv(1, &mine, 1, &theirs, 1, 0);
  });
  attempt("write_init", [=] {
    iovec mine{memory, 8}, theirs{reinterpret_cast<void*>(0x400000), 8};
    return process_vm_writev(1, &mine, 1, &theirs, 1, 0);
  });
  attempt("steal_descriptor", [] {
    long pid_fd = call(SYS_pidfd_open, 1, 0);
    return pid_fd < 0 ? pid_fd : call(SYS_pidfd_getfd, pid_fd, 0, 0);
  });
  attempt("read_memory_file", [] { return open("/proc/1/mem", O_RDWR); });
  attempt("kcore", [] { return open("/proc/kcore", O_RDONLY); });
  attempt("dev_mem", [] { return open("/dev/mem", O_RDONLY); });
  attempt("dev_kmsg", [] { return open("/dev/kmsg", O_RDONLY); });
  attempt("dev_kvm", [] { return open("/dev/kvm", O_RDWR); });
  attempt("dev_fuse", [] { return open("/dev/fuse", O_RDWR); });
  attempt("sysrq", [] { return open("/proc/sysrq-trigger", O_WRONLY); });
  attempt("core_pattern", [] { return open("/proc/sys/kernel/core_pattern", O_WRONLY); });
  attempt("hostname_file", [] { return open("/proc/sys/kernel/hostname", O_WRONLY); });
  attempt("overcommit", [] { return open("/proc/sys/vm/overcommit_memory", O_WRONLY); });
  attempt("uevent", [] { return open("/sys/kernel/uevent_helper", O_WRONLY); });
  attempt("cgroup", [] { return open("/sys/fs/cgroup/cgroup.procs", O_WRONLY); });
  attempt("release_agent", [] { return open("/sys/fs/cgroup/memory/release_agent", O_WRONLY); });
  attempt("debugfs", [] { return open("/sys/kernel/debug/x", O_CREAT | O_WRONLY, 0600); });
}

void try_sockets() {
  struct { const char* name; int family, type, protocol; } kinds[] = {
      {"packet", AF_PACKET, SOCK_RAW, 0},    {"vsock", AF_VSOCK, SOCK_STREAM, 0},
      {"raw_icmp", AF_INET, SOCK_RAW, 1},    {"raw_icmp6", AF_INET6, SOCK_RAW, 58},
      {"raw_ip", AF_INET, SOCK_RAW, 255},    {"alg", AF_ALG, SOCK_SEQPACKET, 0},
      {"bluetooth", AF_BLUETOOTH, SOCK_RAW, 0}, {"can", AF_CAN, SOCK_RAW, 1},
      {"tipc", AF_TIPC, SOCK_STREAM, 0},     {"xdp", AF_XDP, SOCK_RAW, 0},
      {"key", AF_KEY, SOCK_RAW, 2},          {"rds", AF_RDS, SOCK_SEQPACKET, 0}};
  for (auto& kind : kinds)
    attempt(kind.name, [&] { return socket(kind.family, kind.type, kind.protocol); });
  attempt("netlink_route", [] {
    // Adds an address to the loopback device.
    struct { uint32_t length; uint16_t type, flags; uint32_t sequence, pid; unsigned char body[16]; }
        message{32, 20, 0x605, 1, 0, {AF_INET, 8, 0, 0, 1, 0, 0, 0, 8, 0, 2, 0, 10, 9, 8, 7}};
    int fd = socket(AF_NETLINK, SOCK_RAW, 0);
    if (fd < 0) return static_cast<long>(fd);
    send(fd, &message, sizeof message, 0);
    struct { uint32_t length; uint16_t type, flags; uint32_t sequence, pid; int error; } reply{};
    recv(fd, &reply, sizeof reply, MSG_DONTWAIT);
    errno = -reply.error;
    return static_cast<long>(reply.error);
  });
}

// Connecting ----------------------------------------------------------------------------------

int dial(const char* host, int port, int type) {
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  bool is_v6 = inet_pton(AF_INET6, host, &v6.sin6_addr) == 1;
  v6.sin6_family = AF_INET6, v4.sin_family = AF_INET;
  v6.sin6_port = v4.sin_port = htons(port);
  if (!is_v6 && inet_pton(AF_INET, host, &v4.sin_addr) != 1) return errno = EDESTADDRREQ, -1;
  int fd = socket(is_v6 ? AF_INET6 : AF_INET, type, 0);
  timeval limit{5, 0};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  sockaddr* address = is_v6 ? reinterpret_cast<sockaddr*>(&v6) : reinterpret_cast<sockaddr*>(&v4);
  if (fd < 0 || connect(fd, address, is_v6 ? sizeof v6 : sizeof v4) < 0) return -1;
  return fd;
}

long send_datagram(const char* host, int port) {
  int fd = dial(host, port, SOCK_DGRAM);
  if (fd < 0 || send(fd, "leak", 4, 0) < 0) return -1;
  return send(fd, "leak", 4, 0);  // the first one's refusal comes with the second
}

long connect_unix(const std::string& name) {
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, name.data(), std::min(name.size(), sizeof address.sun_path));
  socklen_t length = offsetof(sockaddr_un, sun_path) + name.size();
  return fd < 0 ? fd : connect(fd, reinterpret_cast<sockaddr*>(&address), length);
}

void talk(const char* host, int port, const char* words) {
  int fd = dial(host, port, SOCK_STREAM);
  if (fd < 0) return say("connect", fd);
  std::string request = words;
  for (size_t at; (at = request.find("\\n")) != request.npos;) request.replace(at, 2, "\r\n");
  if (write(fd, request.data(), request.size()) < 0) return say("write", -1);
  shutdown(fd, SHUT_WR);
  std::string answer;
  char bytes[4096];
  for (ssize_t n; (n = read(fd, bytes, sizeof bytes)) > 0;) answer.append(bytes, n);
  close(fd);
  printf("%s\n", answer.substr(0, answer.find('\r')).c_str());
}

int listen_on(int port) {
  int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0 || listen(fd, 8) < 0)
    return say("listen", -1), 0;
  say("listen", 0);
  for (;;) {
    int client = accept(fd, nullptr, nullptr);
    say("accepted", client);
    close(client);
  }
}

// Using up ------------------------------------------------------------------------------------

int use_memory(long bytes) {
  const long step = 8 << 20;
  for (long used = 0; used < bytes; used += step) {
    void* block = malloc(step);
    if (!block) return printf("stopped %ld %s\n", used, answer(-1)), 0;
    memset(block, 1, step);
  }
  puts("took-all");
  fflush(stdout);
  sleep(2);  // where memory is looked at now and then, it must still be there
  return 0;
}

int make_zombies(int count, bool orphaned) {
  int made = 0;
  const char* stopped = "ok";
  for (; made < count; ++made) {
    pid_t child = fork();
    if (child < 0) {
      stopped = answer(-1);
      break;
    }
    if (child == 0) {
      if (orphaned && fork() == 0) {
        usleep(1000);
        _exit(0);
      }
      _exit(0);
    }
    if (orphaned) waitpid(child, nullptr, 0);
  }
  return printf("made %d %s\n", made, stopped), 0;
}

int make_files(const std::string& directory, int count) {
  int made = 0;
  mkdir(directory.c_str(), 0755);
  for (; made < count; ++made) {
    int fd = open((directory + "/" + std::to_string(made)).c_str(), O_CREAT | O_WRONLY, 0644);
    if (fd < 0) break;
    close(fd);
  }
  return printf("made %d %s\n", made, made == count ? "ok" : answer(-1)), 0;
}

int fill(const char* path, long bytes) {
  signal(SIGXFSZ, SIG_IGN);
  static char block[1 << 20];
  memset(block, 1, sizeof block);
  int fd = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0644);
  long written = 0;
  ssize_t n = fd;
  while (n >= 0 && written < bytes && (n = write(fd, block, sizeof block)) >= 0) written += n;
  return printf("wrote %ld %s\n", written, n < 0 ? answer(-1) : "ok"), 0;
}

int sparse(const char* path, long bytes) {
  signal(SIGXFSZ, SIG_IGN);
  int fd = open(path, O_CREAT | O_RDWR | O_TRUNC, 0644);
  say("truncate", ftruncate(fd, bytes));
  say("allocate", fallocate(fd, 0, 0, bytes) );
  return 0;
}

int spin(int threads, int seconds) {
  std::vector<std::thread> all;
  time_t end = time(nullptr) + seconds;
  for (int i = 0; i < threads; ++i)
    all.emplace_back([=] {
      for (volatile long n = 0; time(nullptr) < end;) n = n + 1;
    });
  for (auto& thread : all) thread.join();
  return 0;
}

int inject_input() {
  for (int fd : {0, 1, 2}) say("inject", ioctl(fd, TIOCSTI, "x"));
  int terminal = open("/dev/tty", O_RDWR);
  say("dev_tty", terminal);
  say("console", open("/dev/console", O_RDWR));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "";
  auto word = [&](int i) { return i < argc ? argv[i] : ""; };
  if (mode == "kernel") return try_namespaces(), try_privileges(), try_kernel_surface(), 0;
  if (mode == "sockets") return try_sockets(), 0;
  if (mode == "reach")
    for (int i = 3; i < argc; ++i) {
      say("tcp", dial(argv[i], atoi(word(2)), SOCK_STREAM));
      say("udp", send_datagram(argv[i], atoi(word(2))));
    }
  if (mode == "unix")
    for (int i = 2; i < argc; ++i) say("unix", connect_unix(argv[i]));
  if (mode == "talk")
    for (int i = 4; i < argc; ++i) talk(word(2), atoi(word(3)), argv[i]);
  if (mode == "reach" || mode == "unix" || mode == "talk") return 0;
  if (mode == "abstract") return say("abstract", connect_unix(std::string(1, 0) + word(2))), 0;
  if (mode == "listen") return listen_on(atoi(word(2)));
  if (mode == "overwrite") return say("overwrite", open(word(2), O_WRONLY | O_TRUNC)), 0;
  if (mode == "tty") return inject_input();
  if (mode == "memory") return use_memory(atol(word(2)));
  if (mode == "orphans") return make_zombies(atoi(word(2)), true);
  if (mode == "zombies") return make_zombies(atoi(word(2)), false);
  if (mode == "files") return make_files(word(2), atoi(word(3)));
  if (mode == "fill") return fill(word(2), atol(word(3)));
  if (mode == "sparse") return sparse(word(2), atol(word(3)));
  if (mode == "spin") return spin(atoi(word(2)), atoi(word(3)));
  fprintf(stderr, "probe: what is %s?\n", mode.c_str());
  return 2;
}
