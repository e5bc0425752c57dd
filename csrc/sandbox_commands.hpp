// Commands, their keepers and their output. Part of sandbox_agent.cpp.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "sandbox_processes.hpp"

namespace {

constexpr size_t kStdinLimit = 1 << 20;  // the host keeps to a smaller window
constexpr int64_t kDrain_ms = 200;       // for output after the leader's end

// What a keeper, or a leader that could not start, tells the agent. Small: one atomic write.
struct Report {
  uint32_t stage;  // kEndedStage, or the Stage that failed
  int32_t value;   // wait status, or errno
};
constexpr uint32_t kEndedStage = 100;

// Asked by a child, as a keeper would: process 1 may get another answer.
bool knows_subreapers() {
  pid_t child = fork();
  if (child == 0) {
    int on = 0;
    bool knows = prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0 &&
                 prctl(PR_GET_CHILD_SUBREAPER, &on, 0, 0, 0) == 0 && on == 1;
    _exit(knows ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0;
}

struct Command {
  uint32_t request = 0;
  pid_t keeper = 0;
  int report = -1, in = -1, out = -1, err = -1;
  std::string pending;     // stdin that is not written yet
  bool in_ended = false;
  bool ended = false;      // the leader has
  bool answered = false;   // the host knows; what comes after is read and dropped
  bool owes = false;       // the time for draining is over: `owed` bytes are the last
  int wait_status = 0;
  int64_t drain_until_ms = 0;
  int owed[2] = {0, 0};
  std::set<pid_t> spared;  // orphans that were there before
};
std::vector<Command> g_commands;

// Direct children that are neither keepers nor the forwarder.
std::set<pid_t> find_orphans() {
  std::set<pid_t> known{g_forwarder}, found;
  for (const Command& command : g_commands) known.insert(command.keeper);
  for (const Process& p : all_processes())
    if (p.alive() && p.parent == getpid() && !known.count(p.pid)) found.insert(p.pid);
  return found;
}

void shut(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

void close_from(int first) {
#ifdef SYS_close_range
  if (syscall(SYS_close_range, first, ~0U, 0) == 0) return;
#endif
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  int last = static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 65536));
  for (int fd = first; fd < last; ++fd) close(fd);
}

[[noreturn]] void fail_start(int report, uint32_t stage) {
  Report message{stage, errno};
  if (write(report, &message, sizeof message) < 0) _exit(126);
  _exit(127);
}

[[noreturn]] void run_leader(int in, int out, int err, int report, const std::string& cwd,
                             char** argv, char** env) {
  setsid();
  report = fcntl(report, F_DUPFD_CLOEXEC, 10);
  if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) fail_start(report, kStageFork);
  dup3(report, 3, O_CLOEXEC);
  report = 3;
  close_from(4);
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  // The kernel's choice when memory runs out: a command before the agent. Best effort.
  prctl(PR_SET_DUMPABLE, 1);
  int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (score >= 0 && write(score, "500", 3) < 0) errno = 0;
  shut(score);
  if (chdir(cwd.c_str()) < 0) fail_start(report, kStageCwd);
  environ = env;  // execvp looks PATH up here
  execvp(argv[0], argv);
  fail_start(report, kStageProgram);
}

[[noreturn]] void run_keeper(int in, int out, int err, int report, const std::string& cwd,
                             char** argv, char** env) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  sigset_t waited;
  sigemptyset(&waited);
  sigaddset(&waited, SIGCHLD);
  sigaddset(&waited, SIGTERM);
  sigprocmask(SIG_BLOCK, &waited, nullptr);
  signal(SIGCHLD, SIG_DFL);
  pid_t leader = fork();
  if (leader < 0) fail_start(report, kStageFork);
  if (leader == 0) run_leader(in, out, err, report, cwd, argv, env);
  dup2(report, 0);  // and not the agent's descriptors
  close_from(1);
  for (;;) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
      if (pid == leader) {
        Report message{kEndedStage, status};
        if (write(0, &message, sizeof message) < 0) _exit(0);
      }
    if (pid < 0) _exit(0);  // nobody is left
    if (sigwaitinfo(&waited, nullptr) == SIGTERM) kill_descendants(getpid());  // the agent died
  }
}

void start_command(uint32_t request, Fields fields) {
  bool has_stdin = fields.number<uint8_t>();
  uint32_t argc = fields.number<uint32_t>(), envc = fields.number<uint32_t>();
  std::string cwd = fields.text();
  std::vector<std::string> texts;
  for (uint64_t i = 0; i < uint64_t(argc) + envc; ++i) texts.push_back(fields.text());
  if (argc == 0) die("empty command");
  std::vector<char*> argv, env;
  for (size_t i = 0; i < texts.size(); ++i) (i < argc ? argv : env).push_back(texts[i].data());
  argv.push_back(nullptr);
  env.push_back(nullptr);

  int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, report[2] = {-1, -1};
  bool ok = pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0 &&
            pipe2(report, O_CLOEXEC) == 0;
  if (ok && has_stdin) ok = pipe2(in, O_CLOEXEC) == 0;
  else if (ok) ok = (in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;
  std::set<pid_t> spared;
  if (!g_subreaper) spared = find_orphans();
  pid_t keeper = ok ? fork() : -1;
  int error = errno;
  if (keeper == 0) run_keeper(in[0], out[1], err[1], report[1], cwd, argv.data(), env.data());
  shut(in[0]), shut(out[1]), shut(err[1]), shut(report[1]);
  if (keeper < 0) {
    shut(in[1]), shut(out[0]), shut(err[0]), shut(report[0]);
    send_error(request, kStageFork, error);
    return;
  }
  for (int fd : {in[1], out[0], err[0], report[0]})
    if (fd >= 0) fcntl(fd, F_SETFL, O_NONBLOCK);
  Command command;
  command.request = request, command.keeper = keeper, command.report = report[0];
  command.in = in[1], command.out = out[0], command.err = err[0];
  command.spared = spared;
  g_commands.push_back(command);
}

Command* find_command(uint32_t request) {
  for (Command& command : g_commands)
    if (command.request == request) return &command;
  return nullptr;  // it has ended, while the frame was under way
}

// Those that `command` may have started: what was there before it is not its own, and neither is
// what shares a session with another command that runs.
void kill_orphans(const Command& command) {
  std::set<pid_t> spared_sessions;
  for (const Command& other : g_commands)
    if (&other != &command)
      for (const Process& p : descendants(other.keeper)) spared_sessions.insert(p.session);
  for (int round = 0; round < 100; ++round) {
    bool killed = false;
    for (pid_t pid : find_orphans()) {
      if (command.spared.count(pid) || spared_sessions.count(getsid(pid))) continue;
      kill(pid, SIGSTOP);
      kill_descendants(pid);
      kill(pid, SIGKILL);
      killed = true;
    }
    if (!killed) return;
    sleep_ms(std::min(round, 20));
    reap();
  }
}

void kill_command(const Command& command) {
  kill(command.keeper, SIGCONT);  // the command may have stopped it
  kill_descendants(command.keeper);
  if (!g_subreaper) kill_orphans(command);
}

void on_report(Command& command) {
  Report message;
  ssize_t n = read(command.report, &message, sizeof message);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n == sizeof message) {
    if (message.stage != kEndedStage && !command.answered) {
      send_error(command.request, message.stage, message.value);
      command.answered = true;
    } else if (!command.ended) {
      command.ended = true;
      command.wait_status = message.value;
      command.drain_until_ms = now_ms() + kDrain_ms;
    }
    return;
  }
  shut(command.report);  // the keeper is gone
  if (command.ended || command.answered) return;
  command.ended = true;
  command.wait_status = SIGKILL;
  command.drain_until_ms = now_ms() + kDrain_ms;
  reap();
  kill_orphans(command);
}

void on_output(Command& command, int& fd, uint8_t type) {
  char data[kChunk];
  int& owed = command.owed[type == kStderr];
  size_t most = command.owes && !command.answered ? std::min<size_t>(owed, kChunk) : kChunk;
  if (most == 0) return;
  ssize_t n = read(fd, data, most);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    shut(fd);
    owed = 0;
    return;
  }
  if (command.answered) return;
  if (command.owes) owed -= n;
  send(type, command.request, std::string(data, n));
}

void write_stdin(Command& command) {
  if (command.in < 0) return;
  if (!command.pending.empty()) {
    ssize_t n = write(command.in, command.pending.data(), command.pending.size());
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n < 0) {  // it does not read: the rest is taken and dropped
      n = command.pending.size();
      shut(command.in);
    }
    command.pending.erase(0, n);
    std::string taken;
    put(taken, static_cast<uint32_t>(n));
    if (!command.answered) send(kStdinTaken, command.request, taken);
  }
  if (command.pending.empty() && command.in_ended) shut(command.in);
}

// Answers for commands that are complete, and forgets those of which nothing is left.
void settle_commands() {
  for (Command& command : g_commands) {
    if (!command.ended || command.answered) continue;
    if (!command.owes && now_ms() >= command.drain_until_ms) {
      command.owes = true;
      if (command.out >= 0) ioctl(command.out, FIONREAD, &command.owed[0]);
      if (command.err >= 0) ioctl(command.err, FIONREAD, &command.owed[1]);
    }
    bool drained = command.owes && command.owed[0] == 0 && command.owed[1] == 0;
    if (!drained && (command.out >= 0 || command.err >= 0)) continue;
    int status = command.wait_status;
    std::string payload;
    put(payload, static_cast<uint8_t>(WIFSIGNALED(status)));
    uint32_t code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
    put(payload, code);
    send(kEnded, command.request, payload);
    command.answered = true;
  }
  for (Command& command : g_commands)
    if (command.answered && command.report < 0) shut(command.in);
  g_commands.erase(std::remove_if(g_commands.begin(), g_commands.end(), [](const Command& c) {
    return c.answered && c.report < 0 && c.out < 0 && c.err < 0; }), g_commands.end());
}

}  // namespace
