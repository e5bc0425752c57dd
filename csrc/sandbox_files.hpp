// Reading and writing files for the host. Part of sandbox_agent.cpp.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <deque>
#include <map>

#include "sandbox_frames.hpp"

namespace {

struct Reading {
  uint32_t request;
  int fd;
  uint64_t left;
};
std::deque<Reading> g_readings;

struct Writing {
  int fd;
  std::string temporary, target;
};
std::map<uint32_t, Writing> g_writings;

// Links, devices and fifos cannot hold the agent up: it opens without blocking, and looks.
int open_regular(const std::string& path) {
  int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  struct stat info;
  if (fd < 0 || fstat(fd, &info) < 0) return fd;
  if (S_ISREG(info.st_mode)) return fd;
  close(fd);
  errno = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
  return -1;
}

void start_reading(uint32_t request, Fields fields) {
  uint64_t most = fields.number<uint64_t>();
  int fd = open_regular(fields.text());
  if (fd < 0) return send_error(request, kStageFile, errno);
  g_readings.push_back({request, fd, most});
}

void continue_readings() {
  char data[kChunk];
  while (!g_readings.empty() && g_queue.size() < kQueueLimit) {
    Reading& reading = g_readings.front();
    // One byte more than wanted tells a file that is too long from one that just fits.
    uint64_t most = std::min<uint64_t>(reading.left, kChunk - 1) + 1;
    ssize_t n = read(reading.fd, data, most);
    if (n < 0 && errno == EINTR) continue;
    if (n > 0 && static_cast<uint64_t>(n) <= reading.left) {
      reading.left -= n;
      send(kData, reading.request, std::string(data, n));
      continue;
    }
    if (n == 0) send(kDone, reading.request);
    else send_error(reading.request, kStageFile, n < 0 ? errno : EFBIG);
    close(reading.fd);
    g_readings.pop_front();
  }
}

bool make_parents(const std::string& path) {
  for (size_t slash = path.find('/', 1); slash != path.npos; slash = path.find('/', slash + 1))
    if (mkdir(path.substr(0, slash).c_str(), 0755) < 0 && errno != EEXIST) {
      struct stat info;  // a read-only place says EROFS for a directory that is there
      int error = errno;
      if (stat(path.substr(0, slash).c_str(), &info) < 0) return errno = error, false;
    }
  return true;
}

// A last component that is a link is followed, as an open for writing would.
bool follow_links(std::string& path) {
  for (int hops = 0; hops < 40; ++hops) {
    char target[4096];
    ssize_t n = readlink(path.c_str(), target, sizeof target - 1);
    if (n < 0) return true;
    std::string next(target, n);
    path = next[0] == '/' ? next : path.substr(0, path.rfind('/') + 1) + next;
  }
  errno = ELOOP;
  return false;
}

void start_writing(uint32_t request, Fields fields) {
  mode_t mode = fields.number<uint32_t>() & 0777;
  Writing writing{-1, "", fields.text()};
  if (!make_parents(writing.target) || !follow_links(writing.target))
    return send_error(request, kStageFile, errno);
  struct stat info;
  if (stat(writing.target.c_str(), &info) == 0) {
    if (!S_ISREG(info.st_mode))
      return send_error(request, kStageFile, S_ISDIR(info.st_mode) ? EISDIR : EINVAL);
    mode = info.st_mode & 0777;
  }
  std::string directory = writing.target.substr(0, writing.target.rfind('/') + 1);
  for (int attempt = 0; attempt < 100 && writing.fd < 0; ++attempt) {
    static uint32_t count = 0;
    writing.temporary = directory + ".~" + std::to_string(getpid()) + "." + std::to_string(++count);
    writing.fd = open(writing.temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (writing.fd < 0 && errno != EEXIST) break;
  }
  if (writing.fd < 0) return send_error(request, kStageFile, errno);
  fchmod(writing.fd, mode);
  g_writings[request] = writing;
}

void continue_writing(uint32_t request, Fields fields, bool last) {
  auto found = g_writings.find(request);
  if (found == g_writings.end()) return;  // it failed already
  Writing& writing = found->second;
  int error = 0;
  while (!error && fields.at < fields.end) {
    ssize_t n = write(writing.fd, fields.at, fields.end - fields.at);
    if (n >= 0) fields.at += n;
    else if (errno != EINTR) error = errno;
  }
  if (!error && !last) return;
  if (close(writing.fd) < 0 && !error) error = errno;
  if (!error && rename(writing.temporary.c_str(), writing.target.c_str()) < 0) error = errno;
  if (error) {
    unlink(writing.temporary.c_str());
    send_error(request, kStageFile, error);
  } else {
    send(kDone, request);
  }
  g_writings.erase(found);
}

void cancel_file(uint32_t request) {
  auto reading = std::find_if(g_readings.begin(), g_readings.end(),
                              [&](const Reading& r) { return r.request == request; });
  auto writing = g_writings.find(request);
  if (reading != g_readings.end()) {
    close(reading->fd);
    g_readings.erase(reading);
  } else if (writing != g_writings.end()) {
    close(writing->second.fd);
    unlink(writing->second.temporary.c_str());
    g_writings.erase(writing);
  } else {
    return;  // answered while the frame was under way
  }
  send_error(request, kStageFile, ECANCELED);
}

}  // namespace
