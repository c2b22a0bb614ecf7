/* What TCP allows for an all_reduce of two ranks: bare sockets, reduce_scatter and then all_gather, each half
 * sent while the other is received (one thread, poll, non-blocking) and added as it arrives. No framing, no checks.
 *
 *     gcc -O3 -march=native -o tcp_floor tcp_floor.c -lm && ./tcp_floor 2 4 65536 1048576
 *
 * With FLOOR_CALL=send_recv instead half of what it takes to send the data there and back.
 *
 * Prints a line of JSON for each size in bytes, which follow the number of ranks. The ranks are this process and its child on the loopback,
 * or with FLOOR_RANK (0 or 1), FLOOR_ADDRESS and FLOOR_PORT set one process on each of two hosts. There the kernel chooses the sizes of buffers. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"

/* Up to so many bytes, everything goes at once, in one direction and the other. */
#define SMALL 4096
#define CHUNK (256ul << 10)
#define BUFFER (4 << 20)
/* Looks in vain before a rank sleeps in poll: what is under way arrives sooner than a sleeper wakes. */
#define LOOKS 200

static int rank, wire;
static float *data, *arrived;
static size_t count;

static ssize_t moved(ssize_t bytes, const char *what) {
    if (bytes < 0 && errno != EAGAIN)
        die(what);
    return bytes < 0 ? 0 : bytes;
}

/* Sends and receives so many bytes at the same time; adds what arrives to `sum`, if there is one. */
static void exchange(const void *out, size_t sends, void *in, size_t receives, float *sum) {
    size_t sent = 0, got = 0, added = 0;
    int looks = 0;
    while (sent < sends || got < receives) {
        ssize_t progress = 0;
        if (sent < sends) {
            size_t most = sends - sent < CHUNK ? sends - sent : CHUNK;
            ssize_t bytes = moved(send(wire, (const char *)out + sent, most, MSG_NOSIGNAL), "send");
            sent += bytes, progress += bytes;
        }
        if (got < receives) {
            size_t most = receives - got < CHUNK ? receives - got : CHUNK;
            ssize_t bytes = recv(wire, (char *)in + got, most, 0);
            if (bytes == 0) {
                fprintf(stderr, "the other rank has gone\n");
                exit(1);
            }
            bytes = moved(bytes, "recv");
            got += bytes, progress += bytes;
            for (; sum && added < got / sizeof *sum; added++)
                sum[added] += ((const float *)in)[added];
        }
        looks = progress ? 0 : looks + 1;
        if (looks > LOOKS) {
            struct pollfd ready = {wire, (short)((got < receives ? POLLIN : 0) | (sent < sends ? POLLOUT : 0)), 0};
            poll(&ready, 1, 1000);
        }
    }
}

static int is_ping;

static void ping(size_t bytes) {
    if (rank == 0)
        exchange(data, bytes, NULL, 0, NULL);
    exchange(NULL, 0, arrived, bytes, NULL);
    if (rank == 1)
        exchange(data, bytes, NULL, 0, NULL);
}

static void call(void) {
    size_t bytes = count * sizeof *data, half = count / 2;
    if (is_ping) {
        ping(bytes);
        return;
    }
    if (bytes <= SMALL) {
        exchange(data, bytes, arrived, bytes, NULL);
        for (size_t i = 0; i < count; i++)
            data[i] += arrived[i];
        return;
    }
    float *mine = data + (rank ? half : 0), *theirs = data + (rank ? 0 : half);
    size_t own = (rank ? count - half : half) * sizeof *data, other = bytes - own;
    exchange(theirs, other, arrived, own, mine);
    exchange(mine, own, theirs, other, NULL);
}

static double longest(double seconds) {
    double other;
    exchange(&seconds, sizeof seconds, &other, sizeof other, NULL);
    return fmax(seconds, other);
}

static long wrong(void) {
    double found = 0, other;
    for (size_t i = 0; i < count; i++)
        data[i] = i % 61 + rank;
    call();
    for (size_t i = 0; i < count; i++)
        found += is_ping ? arrived[i] != i % 61 + !rank : data[i] != i % 61 * 2 + 1;
    exchange(&found, sizeof found, &other, sizeof other, NULL);
    return found + other;
}

static int has_hosts;

static int make(void) {
    int made = socket(AF_INET, SOCK_STREAM, 0), buffer = BUFFER;
    if (!has_hosts)
        setsockopt(made, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    return made;
}

static int listen_at(struct sockaddr_in *address) {
    socklen_t length = sizeof *address;
    int listener = make(), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)address, length) || listen(listener, 1) || getsockname(listener, (void *)address, &length))
        die("listen");
    return listener;
}

static void connect_ranks(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const char *own = getenv("FLOOR_RANK"), *host = getenv("FLOOR_ADDRESS"), *port = getenv("FLOOR_PORT");
    int one = 1, buffer = BUFFER, listener = -1;
    has_hosts = own && host && port;
    if (has_hosts) {
        rank = atoi(own) == 1;
        address.sin_port = htons(atoi(port));
        if (!inet_aton(host, &address.sin_addr))
            die(host);
        listener = rank ? -1 : listen_at(&address);
    } else {
        listener = listen_at(&address);
        rank = fork() == 0;
    }
    if (rank) {
        int tries = 0;
        while (wire = make(), connect(wire, (void *)&address, sizeof address)) {
            if (errno != ECONNREFUSED || ++tries > 1000)
                die("connect");
            close(wire);
            usleep(10000);
        }
    } else if ((wire = accept(listener, NULL, NULL)) < 0)
        die("accept");
    setsockopt(wire, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!has_hosts)
        setsockopt(wire, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    fcntl(wire, F_SETFL, O_NONBLOCK);
}

int main(int argc, char **argv) {
    if (argc < 3 || atoi(argv[1]) != 2) {
        fprintf(stderr, "usage: tcp_floor 2 BYTES...  (two ranks only)\n");
        return 2;
    }
    const char *name = getenv("FLOOR_CALL");
    is_ping = name && strcmp(name, "send_recv") == 0;
    connect_ranks();
    bind_rank(rank, 2);
    for (int argument = 2; argument < argc; argument++) {
        size_t bytes = strtoul(argv[argument], NULL, 10);
        count = bytes / sizeof *data;
        data = malloc(bytes), arrived = malloc(bytes);
        if (!data || !arrived)
            die("malloc");
        memset(arrived, 0, bytes);
        long elements = wrong();
        /* Sums of zeros stay zeros, however often they are summed. */
        memset(data, 0, bytes);
        double seconds = measure(call, longest);
        if (rank == 0)
            tell(bytes, is_ping ? seconds / 2 : seconds, elements);
        free(data), free(arrived);
    }
    if (!rank)
        wait(NULL);
    return 0;
}
