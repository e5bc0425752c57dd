// Prepares the place of one bubblewrap sandbox in a mount namespace of its own, and becomes bwrap.
//
//   _sandbox_launcher [OPTION...] -- BWRAP ARGUMENT...
//
//   --parent PID           the host process; the launcher ends if that is no longer its parent
//   --control FD           a Unix socket: the overlay's upper directory is sent there, open
//   --cgroup DIRECTORY     (repeated) a group to enter
//   --uid ID               of root only: what to become before bwrap starts
//   --size BYTES --inodes N   quota of everything that is written
//   --lower DIRECTORY      (repeated) layers, highest first
//   --bind SOURCE NAME     (repeated) something of the host, as /tmp/in/NAME for bwrap
//   --rlimit NUMBER VALUE  (repeated)
//
// Nothing is mounted where the host can see it, so all of it goes when the last process does. Below
// /tmp of the new namespace are afterwards: root/{workspace,home,tmp}, the overlay; shm/; in/NAME.
// bwrap thus sees fixed paths only, and needs no right to reach the host's own.
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Bind {
  const char* source;
  const char* name;
  int descriptor;
};

struct Options {
  pid_t parent = 0;
  int control = -1;
  long uid = -1;
  const char* size = nullptr;
  const char* inodes = nullptr;
  std::vector<const char*> cgroups, lowers;
  std::vector<Bind> binds;
  std::vector<std::pair<int, rlim_t>> rlimits;
  char** command = nullptr;
};

[[noreturn]] void fail(const char* what, const char* name = "") {
  fprintf(stderr, "sandbox launcher: %s%s%s: %s\n", what, *name ? " " : "", name, strerror(errno));
  _exit(71);
}

[[noreturn]] void misuse(const char* what) {
  fprintf(stderr, "sandbox launcher: bad option %s\n", what);
  _exit(64);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    int values = name == "--" ? 0 : name == "--bind" || name == "--rlimit" ? 2 : 1;
    if (i + values >= argc) misuse(argv[i]);
    char** value = argv + i + 1;
    if (name == "--") {
      options.command = value;
      break;
    }
    if (name == "--parent") options.parent = atoi(*value);
    else if (name == "--control") options.control = atoi(*value);
    else if (name == "--cgroup") options.cgroups.push_back(*value);
    else if (name == "--uid") options.uid = atol(*value);
    else if (name == "--size") options.size = *value;
    else if (name == "--inodes") options.inodes = *value;
    else if (name == "--lower") options.lowers.push_back(*value);
    else if (name == "--bind") options.binds.push_back({value[0], value[1], -1});
    else if (name == "--rlimit")
      options.rlimits.emplace_back(atoi(value[0]), strtoull(value[1], nullptr, 10));
    else misuse(argv[i]);
    i += values;
  }
  if (!options.command || !*options.command || !options.size || !options.inodes) misuse("(missing)");
  return options;
}

// The host process may have died before the request was made: then nobody would ever tell us.
void die_with(pid_t parent) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("prctl");
  if (parent && getppid() != parent) _exit(0);
}

void write_file(const char* path, const std::string& text) {
  int file = open(path, O_WRONLY | O_CLOEXEC);
  if (file < 0 || write(file, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    fail("cannot write", path);
  close(file);
}

int open_path(const char* path) {
  int descriptor = open(path, O_PATH | O_CLOEXEC);
  if (descriptor < 0) fail("cannot open", path);
  return descriptor;
}

std::string of_descriptor(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

void enter_namespaces() {
  uid_t uid = geteuid();
  gid_t gid = getegid();
  if (unshare(uid == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER))
    fail("cannot make namespaces");
  if (uid != 0) {
    write_file("/proc/self/setgroups", "deny");
    write_file("/proc/self/uid_map", "0 " + std::to_string(uid) + " 1");
    write_file("/proc/self/gid_map", "0 " + std::to_string(gid) + " 1");
  }
  if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr)) fail("cannot make mounts private");
}

void make_directory(const char* path, uid_t owner, mode_t mode) {
  if (mkdir(path, mode) || chmod(path, mode) || chown(path, owner, owner)) fail("cannot make", path);
}

void mount_tree(const Options& options, bool privileged) {
  uid_t owner = options.uid > 0 ? options.uid : 0;
  // Before the tmpfs hides what may lie below /tmp.
  std::string lower;
  for (const char* path : options.lowers) lower += of_descriptor(open_path(path)) + ":";
  std::string quota = std::string("mode=0755,size=") + options.size + ",nr_inodes=" + options.inodes;
  if (mount("sandbox", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, quota.c_str()))
    fail("cannot mount a tmpfs");
  for (const char* path : {"/tmp/base", "/tmp/base/workspace", "/tmp/base/home", "/tmp/base/tmp",
                           "/tmp/upper", "/tmp/work", "/tmp/root", "/tmp/in"})
    make_directory(path, owner, 0755);
  make_directory("/tmp/shm", owner, 0700);
  std::string overlay = "index=off,lowerdir=" + lower + "/tmp/base,upperdir=/tmp/upper,workdir=/tmp/work";
  // A renamed directory must be in the upper directory with all it holds, not as a reference.
  overlay += privileged ? ",redirect_dir=off,metacopy=off" : ",userxattr";
  if (mount("sandbox", "/tmp/root", "overlay", MS_NOSUID | MS_NODEV, overlay.c_str()))
    fail("cannot mount an overlay");
}

void mount_binds(const Options& options) {
  for (const Bind& bind : options.binds) {
    std::string target = std::string("/tmp/in/") + bind.name;
    struct stat status;
    if (fstat(bind.descriptor, &status)) fail("cannot look at", bind.source);
    if (S_ISDIR(status.st_mode)) {
      if (mkdir(target.c_str(), 0755)) fail("cannot make", bind.name);
    } else {
      int file = open(target.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
      if (file < 0) fail("cannot make", bind.name);
      close(file);
    }
    std::string source = of_descriptor(bind.descriptor);
    if (mount(source.c_str(), target.c_str(), nullptr, MS_BIND | MS_REC, nullptr))
      fail("cannot bind", bind.source);
  }
}

void send_upper(int control) {
  int upper = open("/tmp/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (upper < 0) fail("cannot open the upper directory");
  char byte = 'u', space[CMSG_SPACE(sizeof upper)] = {};
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof upper);
  memcpy(CMSG_DATA(header), &upper, sizeof upper);
  if (sendmsg(control, &message, MSG_NOSIGNAL) != 1) fail("cannot send the upper directory");
  close(upper);
  close(control);
}

void become(long uid) {
  if (setgroups(0, nullptr) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))
    fail("cannot become another user");
}

}  // namespace

int main(int argc, char** argv) {
  Options options = parse(argc, argv);
  bool privileged = geteuid() == 0;
  umask(022);
  die_with(options.parent);
  for (const char* group : options.cgroups)
    write_file((std::string(group) + "/cgroup.procs").c_str(), "0");
  enter_namespaces();
  for (Bind& bind : options.binds) bind.descriptor = open_path(bind.source);
  mount_tree(options, privileged);
  mount_binds(options);
  if (options.control >= 0) send_upper(options.control);
  if (options.uid > 0) {
    become(options.uid);
    die_with(options.parent);  // a change of user takes the request back
  }
  for (auto [number, value] : options.rlimits) {
    rlimit limit{value, value};
    if (setrlimit(static_cast<__rlimit_resource_t>(number), &limit)) fail("cannot set a limit");
  }
  // bwrap's first process shows its environment inside: it gets none.
  char* none[] = {nullptr};
  execve(options.command[0], options.command, none);
  fail("cannot start", options.command[0]);
}
