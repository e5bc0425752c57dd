// 127.0.0.1:PORT to the egress proxy's Unix socket. Part of sandbox_agent.cpp.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "sandbox_commands.hpp"

namespace {

constexpr size_t kConnections = 256;
int g_listener = -1;
std::string g_socket;
int64_t g_forwarder_ms = 0;  // when it was started

struct Stream {
  int from, to;
  std::string data;
  bool ended = false, shut = false;

  bool pump(short readable, short writable) {
    char bytes[kChunk];
    if (readable && !ended && data.size() < kChunk) {
      ssize_t n = read(from, bytes, sizeof bytes);
      if (n > 0) data.append(bytes, n);
      else if (n == 0) ended = true;
      else if (errno != EAGAIN && errno != EINTR) return false;
    }
    if (!data.empty() && (writable || readable)) {
      ssize_t n = write(to, data.data(), data.size());
      if (n > 0) data.erase(0, n);
      else if (n < 0 && errno != EAGAIN && errno != EINTR) return false;
    }
    if (ended && data.empty() && !shut) {
      shutdown(to, SHUT_WR);
      shut = true;
    }
    return true;
  }
};

struct Connection {
  Stream up, down;
};

void accept_connection(std::vector<Connection>& connections) {
  int client = accept4(g_listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (client < 0) return;
  int proxy = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, g_socket.c_str(), sizeof address.sun_path - 1);
  if (proxy < 0 || connect(proxy, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) {
    shut(proxy), shut(client);
    return;
  }
  connections.push_back({{client, proxy, ""}, {proxy, client, ""}});
}

[[noreturn]] void run_forwarder() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  g_listener = dup2(g_listener, 0);
  close_from(1);
  std::vector<Connection> connections;
  for (;;) {
    std::vector<pollfd> polled;
    bool room = connections.size() < kConnections;
    polled.push_back({room ? g_listener : -1, POLLIN, 0});
    auto wanted = [](const Stream& in, const Stream& out) {
      bool reads = !in.ended && in.data.size() < kChunk;
      return static_cast<short>((reads ? POLLIN : 0) | (out.data.empty() ? 0 : POLLOUT));
    };
    for (Connection& c : connections) {
      polled.push_back({c.up.from, wanted(c.up, c.down), 0});
      polled.push_back({c.down.from, wanted(c.down, c.up), 0});
    }
    if (poll(polled.data(), polled.size(), -1) < 0) continue;
    for (size_t i = connections.size(); i-- > 0;) {
      Connection& c = connections[i];
      short client = polled[1 + 2 * i].revents, proxy = polled[2 + 2 * i].revents;
      bool ok = !((client | proxy) & (POLLERR | POLLNVAL)) &&
                c.up.pump(client & (POLLIN | POLLHUP), proxy & POLLOUT) &&
                c.down.pump(proxy & (POLLIN | POLLHUP), client & POLLOUT);
      if (ok && !(c.up.shut && c.down.shut)) continue;
      close(c.up.from), close(c.down.from);
      connections.erase(connections.begin() + i);
    }
    if (polled[0].revents) accept_connection(connections);
  }
}

void keep_forwarder() {
  if (g_listener < 0 || g_forwarder > 0 || now_ms() < g_forwarder_ms + 100) return;
  g_forwarder_ms = now_ms();
  g_forwarder = fork();
  if (g_forwarder == 0) run_forwarder();
}

void listen_on(const std::string& option) {
  size_t colon = option.find(':');
  if (colon == option.npos) die("--forward needs PORT:/path");
  g_socket = option.substr(colon + 1);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(atoi(option.c_str()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  g_listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  int on = 1;
  setsockopt(g_listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (g_socket.size() >= sizeof sockaddr_un{}.sun_path ||
      bind(g_listener, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0 ||
      listen(g_listener, 128) < 0)
    die("cannot listen for --forward");
}

}  // namespace
