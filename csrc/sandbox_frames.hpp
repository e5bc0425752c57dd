// What goes to and comes from the host. Part of sandbox_agent.cpp.
#pragma once

#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

constexpr uint32_t kVersion = 1;
constexpr size_t kFrameLimit = 64 << 20;  // of what the host sends
constexpr size_t kChunk = 64 << 10;       // of what the agent sends
constexpr size_t kQueueLimit = 1 << 20;   // above it nothing more is read from commands or files

enum Request : uint8_t { kExec = 1, kStdin, kStdinEnd, kCancel, kRead, kWrite, kWriteData,
                         kWriteEnd, kPause, kResume, kKillAll, kStats };
enum Answer : uint8_t { kHello = 64, kStdout, kStderr, kEnded, kError, kStdinTaken, kData, kDone };
// Where an error happened, for kError.
enum Stage : uint8_t { kStageFile, kStageCwd, kStageProgram, kStageFork };

std::string g_queue;  // to the host

int64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void sleep_ms(long ms) {
  timespec t{ms / 1000, ms % 1000 * 1000000};
  nanosleep(&t, nullptr);
}

[[noreturn]] void die(const char* why) {
  fprintf(stderr, "sandbox agent: %s\n", why);
  _exit(70);
}

template <typename T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void send(uint8_t type, uint32_t request, const std::string& payload = "") {
  put(g_queue, static_cast<uint32_t>(payload.size()));
  put(g_queue, type);
  put(g_queue, request);
  g_queue += payload;
}

void send_error(uint32_t request, uint8_t stage, int error) {
  std::string payload;
  put(payload, stage);
  put(payload, static_cast<uint32_t>(error));
  send(kError, request, payload);
}

// The fields of one frame; a frame that is too short is the host's error, and ends the agent.
struct Fields {
  const char *at, *end;

  template <typename T>
  T number() {
    if (static_cast<size_t>(end - at) < sizeof(T)) die("short frame");
    T value;
    memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
  }
  std::string text() {
    const void* stop = memchr(at, 0, end - at);
    if (!stop) die("unterminated string");
    std::string value(at, static_cast<const char*>(stop));
    at += value.size() + 1;
    return value;
  }
};

}  // namespace
