/* Sends back what it gets, addresses exchanged and every other byte inverted, until a frame of type 0xdead
 * comes; then sends COUNT frames of its own, of all sizes, and waits for the last to be confirmed. */
#include "slipway_port.h"

#include <stdio.h>
#include <stdlib.h>

static void answer(uint8_t *to, const uint8_t *from, size_t length)
{
    memcpy(to, from + 6, 6);
    memcpy(to + 6, from, 6);
    memcpy(to + 12, from + 12, 2);
    for (size_t i = 14; i < length; i++)
        to[i] = (uint8_t)~from[i];
}

static int fail(const char *what, int error)
{
    fprintf(stderr, "%s: %s\n", what, strerror(-error));
    return 1;
}

/* Answers all frames of a burst; 1 after the last, 0, or an error. */
static int serve(struct slipway_port *port, const struct slipway_frame *frames, int count)
{
    static uint8_t whole[SLIPWAY_PORT_MAX_FRAME], reply[SLIPWAY_PORT_MAX_FRAME];
    size_t length = 0;
    for (int i = 0; i < count; i++) {
        memcpy(whole + length, frames[i].bytes, frames[i].length);
        length += frames[i].length;
        if (frames[i].more)
            continue;
        if (whole[12] == 0xde && whole[13] == 0xad)
            return 1;
        answer(reply, whole, length);
        struct iovec one = {reply, length};
        int sent;
        while ((sent = slipway_port_send(port, &one, 1)) == 0)
            ;
        if (sent < 0)
            return sent;
        length = 0;
    }
    return 0;
}

/* Frames made in the ring itself. */
static int send_own(struct slipway_port *port, uint32_t count, const uint8_t *peer)
{
    for (uint32_t number = 0; number < count; number++) {
        int room;
        while ((room = slipway_port_free(port, 1)) == 0)
            ;
        if (room < 0)
            return room;
        uint32_t length = 60 + number % 1000;
        uint8_t *frame = slipway_port_slot(port, 0);
        memcpy(frame, peer, 6);
        memcpy(frame + 6, port->mac, 6);
        frame[12] = 0x88;
        frame[13] = 0xb5;
        memcpy(frame + 14, &number, sizeof(number));
        for (uint32_t at = 18; at < length; at++)
            frame[at] = (uint8_t)(at * 7 + number);
        slipway_port_describe(port, 0, length, false);
        slipway_port_publish(port, 1);
    }
    return 0;
}

int main(int count, char **words)
{
    if (count != 3)
        return 2;
    struct slipway_port port, second;
    int error = slipway_port_connect(&port, words[1], 10000);
    if (error)
        return fail("connect", error);
    if (slipway_port_connect(&second, words[1], 10000) != -EBUSY)
        return fail("a second one has the port", 0);
    uint8_t peer[6] = {0};
    int done = 0;
    while (!done) {
        struct slipway_frame frames[64];
        int ready = slipway_port_wait(&port, 60000);
        if (ready <= 0)
            return fail("wait", ready ? ready : -ETIMEDOUT);
        int there = slipway_port_receive(&port, frames, 64);
        if (there < 0)
            return fail("receive", there);
        if (there)
            memcpy(peer, frames[there - 1].bytes + 6, 6);
        done = serve(&port, frames, there);
        slipway_port_release(&port);
        if (done < 0)
            return fail("send", done);
    }
    error = send_own(&port, (uint32_t)atoi(words[2]), peer);
    if (error)
        return fail("send", error);
    /* The daemon's end of the line. */
    int last = slipway_port_wait(&port, 60000);
    while (last > 0) {
        struct slipway_frame frames[64];
        if (slipway_port_receive(&port, frames, 64) < 0)
            return fail("receive", -EPROTO);
        slipway_port_release(&port);
        last = slipway_port_wait(&port, 60000);
    }
    slipway_port_close(&port);
    if (last != -ECONNRESET)
        return fail("the end", last ? last : -ETIMEDOUT);
    printf("malformed %llu\n", (unsigned long long)port.malformed);
    return 0;
}
