// Finding, stopping and killing processes. Part of sandbox_agent.cpp.
#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <unordered_map>
#include <vector>

#include "sandbox_frames.hpp"

namespace {

bool g_namespace = false;  // all processes here are the agent's
bool g_subreaper = true;   // keepers keep their orphans: see sandbox_agent.cpp
pid_t g_forwarder = 0;

struct Process {
  pid_t pid, parent, session;
  char state;
  uint64_t cpu_ticks, threads, rss_pages;
  bool alive() const { return state != 'Z' && state != 'X'; }
};

std::vector<Process> all_processes() {
  std::vector<Process> found;
  DIR* directory = opendir("/proc");
  if (!directory) return found;
  while (dirent* entry = readdir(directory)) {
    Process p{};
    p.pid = atoi(entry->d_name);
    if (p.pid <= 0) continue;
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", p.pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    ssize_t n = read(fd, line, sizeof line - 1);
    close(fd);
    if (n <= 0) continue;
    line[n] = 0;
    const char* after = strrchr(line, ')');  // the name before it may hold anything
    unsigned long user = 0, system = 0, threads = 0;
    long rss = 0;
    const char* fields = " %c %d %*d %d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d %*d %lu"
                         " %*d %*u %*u %ld";
    if (!after ||
        sscanf(after + 1, fields, &p.state, &p.parent, &p.session, &user, &system, &threads,
               &rss) < 7)
      continue;
    p.cpu_ticks = user + system;
    p.threads = threads;
    p.rss_pages = rss;
    found.push_back(p);
  }
  closedir(directory);
  return found;
}

std::vector<Process> descendants(pid_t root) {
  std::vector<Process> all = all_processes(), found;
  std::unordered_map<pid_t, pid_t> parent;
  for (const Process& p : all) parent[p.pid] = p.parent;
  for (const Process& p : all) {
    size_t steps = 0;  // the table was not read at one instant: it may hold a ring
    for (auto up = parent.find(p.pid); up != parent.end() && steps++ < all.size();
         up = parent.find(up->second))
      if (up->second == root) {
        found.push_back(p);
        break;
      }
  }
  return found;
}

// Stops before it kills, so that nothing can fork away from the scan; repeats until none is left.
void kill_descendants(pid_t root) {
  for (int round = 0; round < 200; ++round) {
    std::set<pid_t> stopped;
    for (bool grew = true; grew;) {
      grew = false;
      for (const Process& p : descendants(root))
        if (p.alive() && stopped.insert(p.pid).second) {
          kill(p.pid, SIGSTOP);
          grew = true;
        }
    }
    if (stopped.empty()) return;
    for (pid_t pid : stopped) kill(pid, SIGKILL);
    sleep_ms(std::min(round, 20));
  }
}

// What pause, kill and statistics speak of: all but the agent and process 1.
std::vector<Process> managed_processes() {
  if (!g_namespace) return descendants(getpid());
  std::vector<Process> found = all_processes();
  found.erase(std::remove_if(found.begin(), found.end(), [](const Process& p) {
    return p.pid == 1 || p.pid == getpid() || !p.alive(); }), found.end());
  return found;
}

int signal_managed(int signal_number) {
  if (g_namespace) return kill(-1, signal_number);
  for (const Process& p : managed_processes()) kill(p.pid, signal_number);
  return 0;
}

// True once every process is stopped: only then is nothing being written any more.
bool pause_all() {
  int rounds = 0;
  for (int64_t end = now_ms() + 5000; now_ms() < end; sleep_ms(1)) {
    // The parent of a vfork stops only when its child has gone on to exec, and the child is stopped.
    if (++rounds % 20 == 0) {
      signal_managed(SIGCONT);
      sleep_ms(1);
    }
    signal_managed(SIGSTOP);
    bool quiet = true;
    for (const Process& p : managed_processes())
      quiet = quiet && (!p.alive() || p.state == 'T' || p.state == 't');
    if (quiet) return true;
  }
  signal_managed(SIGCONT);
  return false;
}

void reap() {
  for (pid_t pid; (pid = waitpid(-1, nullptr, WNOHANG)) > 0;)
    if (pid == g_forwarder) g_forwarder = 0;
}

bool kill_all() {
  for (int round = 0; round < 500; ++round, sleep_ms(std::min(round, 20))) {
    if (g_namespace) kill(-1, SIGKILL);
    else kill_descendants(getpid());
    reap();
    if (managed_processes().empty()) return true;
  }
  return false;
}

}  // namespace
