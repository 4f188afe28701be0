/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives Ethernet frames at a memory port of a Slipway switch: packet rings in memory that
 * the program and the switch share. C11 with GNU/Linux's system calls, a header and no library.
 *
 *     slipway port create --network NET NAME      makes a port and prints its socket's path
 *
 *     struct slipway_port port;
 *     int error = slipway_port_connect(&port, "/run/slipway/ports/NAME.sock", 10000);
 *     if (error) fprintf(stderr, "%s\n", strerror(-error));
 *     while (slipway_port_wait(&port, -1) >= 0) {
 *         struct slipway_frame frames[64];
 *         int count = slipway_port_receive(&port, frames, 64);
 *         for (int i = 0; i < count; i++) look(frames[i].bytes, frames[i].length);
 *         slipway_port_release(&port);            frames are no more
 *     }
 *     slipway_port_close(&port);
 *
 * The layout of the memory and the messages of the socket are those of the crate slipway-ring, whose
 * documentation is the specification; the offsets below are checked against it. One thread at a time uses
 * a port. Functions that fail return a negative number of errno(3):
 *
 *     -EBUSY  another program has the port        -EPROTONOSUPPORT  the daemon speaks another version
 *     -EPERM  neither root nor this user serves it -ECONNRESET       the daemon went, or the port: connect anew
 *     -EPROTO a counter or a message that cannot be
 *
 * The daemon is believed not to write to slots that it has given away; its counters and lengths are checked.
 */
#ifndef SLIPWAY_PORT_H
#define SLIPWAY_PORT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef F_GET_SEALS
#error "define _GNU_SOURCE before the first #include, or include slipway_port.h first"
#endif

/* The link. */
#define SLIPWAY_RING_MAGIC UINT64_C(0x676e697270696c73) /* "slipring" */
#define SLIPWAY_RING_VERSION 2
#define SLIPWAY_RING_RINGS 4096
/* Of a ring. */
#define SLIPWAY_RING_HEAD 0
#define SLIPWAY_RING_ASLEEP 8
#define SLIPWAY_RING_TAIL 64
#define SLIPWAY_RING_DESCRIPTORS 128
/* Of a descriptor. */
#define SLIPWAY_RING_LENGTH UINT64_C(0x1ffff)
#define SLIPWAY_RING_MORE (UINT64_C(1) << 17)
/* The messages. */
#define SLIPWAY_PORT_MAGIC UINT64_C(0x74726f7070696c73) /* "slipport" */
#define SLIPWAY_PORT_VERSION 1
#define SLIPWAY_HELLO_LENGTH 16
#define SLIPWAY_WELCOME_LENGTH 32
#define SLIPWAY_WELCOME_STATUS 12
#define SLIPWAY_WELCOME_MAC 16
/* Bytes of the largest frame. */
#define SLIPWAY_PORT_MAX_FRAME (65535 + 18)

/* Bytes from a slot to the next. */
static inline size_t slipway_ring_stride(uint32_t payload) { return (size_t)payload + 64; }

/* Of a ring: offset of the slots. */
static inline size_t slipway_ring_data(uint32_t slots)
{
    return (SLIPWAY_RING_DESCRIPTORS + 8 * (size_t)slots + 63) / 64 * 64;
}

/* Bytes of a ring, up to where the next may begin. */
static inline size_t slipway_ring_size(uint32_t slots, uint32_t payload)
{
    size_t size = slipway_ring_data(slots) + slots * slipway_ring_stride(payload);
    return (size + SLIPWAY_RING_RINGS - 1) / SLIPWAY_RING_RINGS * SLIPWAY_RING_RINGS;
}

/* A frame that was received, in the ring until slipway_port_release. */
struct slipway_frame {
    const uint8_t *bytes;
    uint32_t length;
    /* The frame goes on in the next one of the array: longer than a slot. */
    bool more;
};

/* One ring, and this side's place in it. */
struct slipway_ring {
    uint8_t *base;
    uint64_t own;   /* this side's counter */
    uint64_t other; /* the other side's, when it was looked at last */
};

struct slipway_port {
    int socket;
    int tell; /* written to when the switch sleeps */
    int told; /* written to by the switch */
    uint8_t *memory;
    size_t size;
    uint32_t slots;
    uint32_t payload; /* bytes of a slot */
    uint8_t mac[6];   /* the port's address; zeros: any will do */
    struct slipway_ring in, out;
    uint32_t taken;     /* slots that slipway_port_receive gave */
    uint64_t spin_ns;   /* how long to look before sleeping */
    uint64_t malformed; /* slots that cannot be */
};

static inline _Atomic uint64_t *slipway_ring_word(const struct slipway_ring *ring, size_t offset)
{
    return (_Atomic uint64_t *)(void *)(ring->base + offset);
}

static inline _Atomic uint64_t *slipway_ring_descriptor(const struct slipway_port *port,
                                                        const struct slipway_ring *ring, uint64_t slot)
{
    return slipway_ring_word(ring, SLIPWAY_RING_DESCRIPTORS + 8 * (size_t)(slot & (port->slots - 1)));
}

static inline uint8_t *slipway_ring_slot(const struct slipway_port *port,
                                         const struct slipway_ring *ring, uint64_t slot)
{
    return ring->base + slipway_ring_data(port->slots) +
           (size_t)(slot & (port->slots - 1)) * slipway_ring_stride(port->payload);
}

static inline uint64_t slipway_port_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* Detaches. */
static inline void slipway_port_close(struct slipway_port *port)
{
    int files[3] = {port->socket, port->tell, port->told};
    if (port->memory)
        munmap(port->memory, port->size);
    for (int i = 0; i < 3; i++)
        if (files[i] >= 0)
            close(files[i]);
    port->memory = NULL;
    port->socket = port->tell = port->told = -1;
}

/* Whether root or this process's own user listens. */
static inline int slipway_port_know(int socket)
{
    struct ucred peer = {0, 0, 0};
    socklen_t length = sizeof(peer);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length))
        return -errno;
    return peer.uid == 0 || peer.uid == geteuid() ? 0 : -EPERM;
}

/* The daemon's answer, with the memory's descriptor; the other two go to the port. */
static inline int slipway_port_answer(struct slipway_port *port, int *memory)
{
    uint8_t text[SLIPWAY_WELCOME_LENGTH + 1];
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(3 * sizeof(int))];
    } control;
    struct iovec part = {text, sizeof(text)};
    struct msghdr message;
    memset(&message, 0, sizeof(message));
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.space;
    message.msg_controllen = sizeof(control.space);
    ssize_t length = recvmsg(port->socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (length < 0)
        return -errno;
    int files[3] = {-1, -1, -1};
    size_t count = 0;
    for (struct cmsghdr *at = CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS)
            continue;
        size_t more = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < more; i++) {
            int file;
            memcpy(&file, CMSG_DATA(at) + i * sizeof(int), sizeof(int));
            if (count < 3)
                files[count++] = file;
            else
                close(file);
        }
    }
    *memory = files[0];
    port->tell = files[1];
    port->told = files[2];
    uint64_t magic;
    uint32_t status, version;
    if (length == 0)
        return -ECONNRESET;
    if (length != SLIPWAY_WELCOME_LENGTH)
        return -EPROTO;
    memcpy(&magic, text, sizeof(magic));
    memcpy(&version, text + 8, sizeof(version));
    memcpy(&status, text + SLIPWAY_WELCOME_STATUS, sizeof(status));
    memcpy(port->mac, text + SLIPWAY_WELCOME_MAC, sizeof(port->mac));
    if (magic != SLIPWAY_PORT_MAGIC || status > 4095)
        return -EPROTO;
    if (status)
        return -(int)status;
    if (version != SLIPWAY_PORT_VERSION)
        return -EPROTONOSUPPORT;
    return count == 3 ? 0 : -EPROTO;
}

/* Maps the link that the daemon sent. */
static inline int slipway_port_map(struct slipway_port *port, int memory)
{
    struct stat about;
    int seals = fcntl(memory, F_GET_SEALS);
    if (fstat(memory, &about))
        return -errno;
    /* Memory that shrank under us would end this process. */
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || about.st_size < 2 * SLIPWAY_RING_RINGS)
        return -EPROTO;
    port->size = (size_t)about.st_size;
    void *base = mmap(NULL, port->size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (base == MAP_FAILED)
        return -errno;
    port->memory = base;
    uint64_t head[4];
    memcpy(head, base, sizeof(head));
    uint64_t slots = head[2], payload = head[3];
    if (head[0] != SLIPWAY_RING_MAGIC || head[1] != SLIPWAY_RING_VERSION || slots < 16 ||
        slots > 32768 || (slots & (slots - 1)) || payload < 64 || payload > 65536 || payload % 64)
        return -EPROTO;
    port->slots = (uint32_t)slots;
    port->payload = (uint32_t)payload;
    size_t ring = slipway_ring_size(port->slots, port->payload);
    if (port->size < SLIPWAY_RING_RINGS + 2 * ring)
        return -EPROTO;
    /* The server consumes the first. */
    port->out.base = port->memory + SLIPWAY_RING_RINGS;
    port->in.base = port->out.base + ring;
    port->out.own = atomic_load(slipway_ring_word(&port->out, SLIPWAY_RING_HEAD));
    port->out.other = atomic_load(slipway_ring_word(&port->out, SLIPWAY_RING_TAIL));
    port->in.own = port->in.other = atomic_load(slipway_ring_word(&port->in, SLIPWAY_RING_TAIL));
    return 0;
}

static inline int slipway_port_attach(struct slipway_port *port, const char *path, int timeout_ms,
                                      int *memory)
{
    struct sockaddr_un address;
    memset(&address, 0, sizeof(address));
    address.sun_family = AF_UNIX;
    if (strlen(path) >= sizeof(address.sun_path))
        return -ENAMETOOLONG;
    memcpy(address.sun_path, path, strlen(path));
    port->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (port->socket < 0 || connect(port->socket, (struct sockaddr *)&address, sizeof(address)))
        return -errno;
    int error = slipway_port_know(port->socket);
    if (error)
        return error;
    uint8_t hello[SLIPWAY_HELLO_LENGTH] = {0};
    const uint64_t magic = SLIPWAY_PORT_MAGIC;
    const uint32_t version = SLIPWAY_PORT_VERSION;
    memcpy(hello, &magic, sizeof(magic));
    memcpy(hello + 8, &version, sizeof(version));
    if (send(port->socket, hello, sizeof(hello), MSG_NOSIGNAL) < 0)
        return -errno;
    struct pollfd wait = {port->socket, POLLIN, 0};
    int ready = poll(&wait, 1, timeout_ms);
    if (ready <= 0)
        return ready ? -errno : -ETIMEDOUT;
    error = slipway_port_answer(port, memory);
    return error ? error : slipway_port_map(port, *memory);
}

/* Attaches to the port whose socket is at path; waits for the daemon's answer, -1: for ever. 0, or why
 * not: nothing is to be closed then. */
static inline int slipway_port_connect(struct slipway_port *port, const char *path, int timeout_ms)
{
    int memory = -1;
    memset(port, 0, sizeof(*port));
    port->socket = port->tell = port->told = -1;
    int error = slipway_port_attach(port, path, timeout_ms, &memory);
    if (memory >= 0)
        close(memory);
    if (error)
        slipway_port_close(port);
    return error;
}

/* How many frames can be sent, looking at what the switch did only if fewer than wanted were known. */
static inline int slipway_port_free(struct slipway_port *port, uint32_t wanted)
{
    struct slipway_ring *ring = &port->out;
    if (ring->own - ring->other + wanted > port->slots)
        /* Acquire: the switch has read the slots before they are filled again. */
        ring->other =
            atomic_load_explicit(slipway_ring_word(ring, SLIPWAY_RING_TAIL), memory_order_acquire);
    if (ring->own - ring->other > port->slots)
        return -EPROTO;
    return (int)(port->slots - (ring->own - ring->other));
}

/* Where frame number (from 0) of those that slipway_port_free allows is to be made: port->payload bytes. */
static inline uint8_t *slipway_port_slot(struct slipway_port *port, uint32_t number)
{
    return slipway_ring_slot(port, &port->out, port->out.own + number);
}

/* Says how long it is, 1 to port->payload bytes, and whether the frame goes on in the next slot. */
static inline void slipway_port_describe(struct slipway_port *port, uint32_t number, uint32_t length,
                                         bool more)
{
    uint64_t word = (length & SLIPWAY_RING_LENGTH) | (more ? SLIPWAY_RING_MORE : 0);
    atomic_store_explicit(slipway_ring_descriptor(port, &port->out, port->out.own + number), word,
                          memory_order_relaxed);
}

/* Sends the first slots: those that were made and described. */
static inline void slipway_port_publish(struct slipway_port *port, uint32_t slots)
{
    struct slipway_ring *ring = &port->out;
    if (!slots)
        return;
    ring->own += slots;
    /* Release: whoever sees the head sees the slots. */
    atomic_store_explicit(slipway_ring_word(ring, SLIPWAY_RING_HEAD), ring->own, memory_order_release);
    /* Pairs with the switch's, between its word that it sleeps and its last look at the head. */
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t asleep = 1;
    if (atomic_load_explicit(slipway_ring_word(ring, SLIPWAY_RING_ASLEEP), memory_order_relaxed) == 1 &&
        atomic_compare_exchange_strong(slipway_ring_word(ring, SLIPWAY_RING_ASLEEP), &asleep, 0)) {
        const uint64_t one = 1;
        /* A full counter is as good: it is readable. */
        ssize_t written = write(port->tell, &one, sizeof(one));
        (void)written;
    }
}

/* Sends copies of frames, as many as there is room for: how many. */
static inline int slipway_port_send(struct slipway_port *port, const struct iovec *frames, int count)
{
    uint32_t slots = 0;
    int sent = 0;
    for (; sent < count; sent++) {
        const uint8_t *from = (const uint8_t *)frames[sent].iov_base;
        size_t left = frames[sent].iov_len;
        if (left == 0 || left > SLIPWAY_PORT_MAX_FRAME)
            return -EMSGSIZE;
        uint32_t needs = (uint32_t)((left + port->payload - 1) / port->payload);
        int room = slipway_port_free(port, slots + needs);
        if (room < 0)
            return room;
        if ((uint32_t)room < slots + needs)
            break;
        for (; left; slots++) {
            uint32_t part = left < port->payload ? (uint32_t)left : port->payload;
            memcpy(slipway_port_slot(port, slots), from, part);
            left -= part;
            from += part;
            slipway_port_describe(port, slots, part, left != 0);
        }
    }
    slipway_port_publish(port, slots);
    return sent;
}

/* How many slots hold something. */
static inline int slipway_port_available(struct slipway_port *port)
{
    struct slipway_ring *ring = &port->in;
    /* Acquire: the switch has filled the slots before they are read. */
    uint64_t head =
        atomic_load_explicit(slipway_ring_word(ring, SLIPWAY_RING_HEAD), memory_order_acquire);
    if (head - ring->own > port->slots || head < ring->other)
        return -EPROTO;
    ring->other = head;
    return (int)(head - ring->own);
}

/* The frames that are there, up to most of them, without waiting: how many entries were filled in. They
 * lie in the ring until slipway_port_release. A frame that is longer than a slot takes several entries,
 * all of which are there or none: most is at least as many as the longest frame takes. */
static inline int slipway_port_receive(struct slipway_port *port, struct slipway_frame *frames, int most)
{
    int there = slipway_port_available(port);
    int count = 0, whole = 0;
    uint32_t taken = port->taken, at = taken;
    if (there < 0)
        return there;
    for (; at < (uint32_t)there && count < most; at++) {
        uint64_t slot = port->in.own + at;
        uint64_t word =
            atomic_load_explicit(slipway_ring_descriptor(port, &port->in, slot), memory_order_relaxed);
        uint32_t length = (uint32_t)(word & SLIPWAY_RING_LENGTH);
        bool more = (word & SLIPWAY_RING_MORE) != 0;
        if (length == 0 || length > port->payload) {
            port->malformed++;
            length = length ? port->payload : 0;
        }
        frames[count].bytes = slipway_ring_slot(port, &port->in, slot);
        frames[count].length = length;
        frames[count].more = more;
        count++;
        if (!more) {
            whole = count;
            taken = at + 1;
        }
    }
    port->taken = taken;
    return whole;
}

/* Gives the slots of all frames that were received back. */
static inline void slipway_port_release(struct slipway_port *port)
{
    port->in.own += port->taken;
    port->taken = 0;
    atomic_store_explicit(slipway_ring_word(&port->in, SLIPWAY_RING_TAIL), port->in.own,
                          memory_order_release);
}

/* 0 while the daemon is there: a system call. A program that only polls calls it now and then. */
static inline int slipway_port_check(const struct slipway_port *port)
{
    char word;
    ssize_t length = recv(port->socket, &word, 1, MSG_PEEK | MSG_DONTWAIT);
    return length < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -ECONNRESET;
}

/* Asks the switch to tell when there is more: port->told becomes readable. 1: there is something. */
static inline int slipway_port_arm(struct slipway_port *port)
{
    uint64_t count;
    /* Silent first: what is told after this is not lost. */
    ssize_t length = read(port->told, &count, sizeof(count));
    (void)length;
    int there = slipway_port_available(port);
    if (there)
        return there < 0 ? there : 1;
    atomic_store_explicit(slipway_ring_word(&port->in, SLIPWAY_RING_ASLEEP), 1, memory_order_relaxed);
    /* Pairs with the switch's, between its head and its look whether we sleep. */
    atomic_thread_fence(memory_order_seq_cst);
    there = slipway_port_available(port);
    if (there)
        atomic_store_explicit(slipway_ring_word(&port->in, SLIPWAY_RING_ASLEEP), 0,
                              memory_order_relaxed);
    return there < 0 ? there : there > 0;
}

/* Waits until there is a frame: 1; 0 after timeout_ms (-1: never). Frames that were received are to be
 * released before. Looks for a time that follows the traffic, 5 to 200 us, and then sleeps. */
static inline int slipway_port_wait(struct slipway_port *port, int timeout_ms)
{
    const uint64_t least = 5000, longest = 200000, begin = slipway_port_now();
    if (port->spin_ns < least)
        port->spin_ns = least;
    do {
        for (int look = 0; look < 32; look++) {
            int there = slipway_port_available(port);
            if (there) {
                port->spin_ns = port->spin_ns * 2 > longest ? longest : port->spin_ns * 2;
                return there < 0 ? there : 1;
            }
        }
    } while (slipway_port_now() - begin < port->spin_ns);
    port->spin_ns /= 2;
    for (;;) {
        int there = slipway_port_arm(port);
        if (there)
            return there;
        int left = timeout_ms;
        if (timeout_ms >= 0) {
            uint64_t passed = (slipway_port_now() - begin) / 1000000;
            left = passed >= (uint64_t)timeout_ms ? 0 : timeout_ms - (int)passed;
        }
        struct pollfd files[2] = {{port->told, POLLIN, 0}, {port->socket, POLLIN, 0}};
        int ready = poll(files, 2, left);
        if (ready < 0 && errno != EINTR)
            return -errno;
        there = slipway_port_available(port);
        if (there)
            return there < 0 ? there : 1;
        if (slipway_port_check(port))
            return -ECONNRESET;
        if (ready == 0)
            return 0;
    }
}

#endif
