// The process inside a sandbox that starts commands and touches files for the host.
//
//   _sandbox_agent [--namespace] [--forward PORT:/path/to/unix.sock]
//
// The host speaks to it over its stdin and stdout (the other end: megacomposer/env/backend/agent_link.py).
// A frame is `u32 length, u8 type, u32 request` and then `length` bytes, little-endian.
//
// Every command gets a keeper: a child of the agent that is a child subreaper and starts the
// command's first process, the leader. Whatever the command starts stays below its keeper, sessions
// and double forks included, so "all that it started" is a subtree and needs no marks. A keeper
// lives until its subtree is empty. A command that kills its own keeper loses all that it started.
//
// Where there are no subreapers (gVisor's kernel of 2022), orphans come to the agent as process 1.
// Killing a command then also kills the orphans that came after its start, unless they share a
// session with another running command: of commands that run side by side, a timeout may end
// daemons of the other.
//
// --namespace: all processes of this pid namespace are the agent's to stop and to kill (the default
// where it is process 1). Without it, only its descendants are.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <vector>

#include "sandbox_commands.hpp"
#include "sandbox_files.hpp"
#include "sandbox_forwarder.hpp"

namespace {

bool g_paused = false;  // then nothing is sent but answers: a frozen agent can be resumed elsewhere

void send_stats(uint32_t request) {
  uint64_t threads = 0, ticks = 0, pages = 0;
  for (const Process& p : managed_processes()) {
    threads += p.threads;
    ticks += p.cpu_ticks;
    pages += p.rss_pages;
  }
  std::string payload;
  put(payload, threads);
  put(payload, ticks * 1000 / sysconf(_SC_CLK_TCK));
  put(payload, pages * sysconf(_SC_PAGESIZE));
  send(kDone, request, payload);
}

void answer(uint32_t request, bool ok, int error) {
  ok ? send(kDone, request) : send_error(request, kStageFile, error);
}

void handle(uint8_t type, uint32_t request, Fields fields) {
  Command* command = type <= kCancel ? find_command(request) : nullptr;
  switch (type) {
    case kExec: return start_command(request, fields);
    case kStdin:
      if (!command) return;
      command->pending.append(fields.at, fields.end);
      if (command->pending.size() > kStdinLimit) die("more standard input than agreed");
      return;
    case kStdinEnd:
      if (command) command->in_ended = true;
      return;
    case kCancel:
      if (command) return kill_command(*command);
      return cancel_file(request);
    case kRead: return start_reading(request, fields);
    case kWrite: return start_writing(request, fields);
    case kWriteData: return continue_writing(request, fields, false);
    case kWriteEnd: return continue_writing(request, fields, true);
    case kPause: return g_paused = pause_all(), answer(request, g_paused, EBUSY);
    case kResume:
      g_paused = false;
      signal_managed(SIGCONT);
      return answer(request, true, 0);
    case kKillAll:
      g_paused = false;
      return answer(request, kill_all(), EBUSY);
    case kStats: return send_stats(request);
    default: die("unknown request");
  }
}

// False at the end of the host's stream.
bool read_requests(std::string& buffer) {
  char data[kChunk];
  ssize_t n = read(0, data, sizeof data);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (n <= 0) return false;
  buffer.append(data, n);
  size_t at = 0;
  while (buffer.size() - at >= 9) {
    Fields header{buffer.data() + at, buffer.data() + at + 9};
    uint32_t length = header.number<uint32_t>();
    uint8_t type = header.number<uint8_t>();
    uint32_t request = header.number<uint32_t>();
    if (length > kFrameLimit) die("frame too long");
    if (buffer.size() - at - 9 < length) break;
    const char* payload = buffer.data() + at + 9;
    handle(type, request, {payload, payload + length});
    at += 9 + length;
  }
  buffer.erase(0, at);
  return true;
}

bool write_answers() {
  ssize_t n = write(1, g_queue.data(), g_queue.size());
  if (n > 0) g_queue.erase(0, n);
  return n > 0 || errno == EAGAIN || errno == EINTR;
}

void serve() {
  std::string buffer;
  sigset_t none;
  sigemptyset(&none);
  for (;;) {
    reap();
    keep_forwarder();
    if (!g_paused) {
      continue_readings();
      settle_commands();
    }
    std::vector<pollfd> polled{{0, POLLIN, 0}, {g_queue.empty() ? -1 : 1, POLLOUT, 0}};
    int64_t until_ms = g_listener >= 0 && g_forwarder <= 0 ? g_forwarder_ms + 100 : INT64_MAX;
    bool full = g_queue.size() >= kQueueLimit;
    for (Command& c : g_commands) {
      if (g_paused) break;
      if (c.ended && !c.owes && !c.answered) until_ms = std::min(until_ms, c.drain_until_ms);
      bool reads = c.answered || !full;
      bool writes = !c.pending.empty() || c.in_ended;
      polled.push_back({c.report, POLLIN, 0});
      polled.push_back({reads ? c.out : -1, POLLIN, 0});
      polled.push_back({reads ? c.err : -1, POLLIN, 0});
      polled.push_back({writes ? c.in : -1, POLLOUT, 0});
    }
    int64_t wait_ms = std::max<int64_t>(0, until_ms - now_ms());
    timespec timeout{wait_ms / 1000, wait_ms % 1000 * 1000000};
    if (ppoll(polled.data(), polled.size(), until_ms == INT64_MAX ? nullptr : &timeout, &none) < 0)
      continue;
    for (size_t i = 0; i * 4 + 2 < polled.size(); ++i) {  // before new commands come
      Command& c = g_commands[i];
      const pollfd* p = &polled[2 + i * 4];
      if (p[1].revents && c.out >= 0) on_output(c, c.out, kStdout);
      if (p[2].revents && c.err >= 0) on_output(c, c.err, kStderr);
      if (p[3].revents) write_stdin(c);
      if (p[0].revents) on_report(c);
    }
    if (polled[1].revents && !write_answers()) return;
    if (polled[0].revents && !read_requests(buffer)) return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  g_namespace = getpid() == 1;
  for (int i = 1; i < argc; ++i) {
    if (!strcmp(argv[i], "--namespace")) g_namespace = true;
    else if (!strcmp(argv[i], "--forward") && i + 1 < argc) listen_on(argv[++i]);
    else die("unknown option");
  }
  // Not to be traced, and nothing to be read in /proc: commands run as the same user.
  prctl(PR_SET_DUMPABLE, 0);
  for (char** variable = environ; *variable; ++variable) memset(*variable, 0, strlen(*variable));
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  g_subreaper = knows_subreapers();
  umask(022);
  signal(SIGPIPE, SIG_IGN);
  struct sigaction on_child {};
  on_child.sa_handler = [](int) {};  // wakes ppoll
  sigaction(SIGCHLD, &on_child, nullptr);
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGCHLD);
  sigprocmask(SIG_BLOCK, &blocked, nullptr);
  fcntl(0, F_SETFL, O_NONBLOCK);
  fcntl(1, F_SETFL, O_NONBLOCK);
  std::string hello;
  put(hello, kVersion);
  send(kHello, 0, hello);
  serve();
  kill_all();
  return 0;
}
