// SPDX-License-Identifier: GPL-2.0
/*
 * Receiving. The poll owns the ring. Each descriptor has a buffer of 2048 bytes; the first of a
 * frame becomes the head of its skb, without a copy, and the others are its fragments, so that a
 * change of the MTU changes no buffer.
 *
 * With the block a frame may come as its sender's stack made it: without its checksum, or as a
 * whole TCP segment of up to 64 KiB. A header of virtio's says so.
 */
#include <linux/etherdevice.h>
#include <linux/if_vlan.h>
#include <linux/ip.h>
#include <linux/virtio_net.h>

#include "slip.h"

#define BUFFER		2048
#define HEADROOM	(NET_SKB_PAD + NET_IP_ALIGN)
#define TRUESIZE	(SKB_DATA_ALIGN(HEADROOM + BUFFER) + \
			 SKB_DATA_ALIGN(sizeof(struct skb_shared_info)))
/* Bytes of the longest frame, with its header. */
#define LONGEST		(SLIP_HEADER + VLAN_ETH_HLEN + 0xffff)
/* Buffers that are given back at once: each time may cost an exit. */
#define BATCH		32

int slip_rx_alloc(struct slip_nic *nic)
{
	struct slip_rx *rx = &nic->rx;

	rx->ring = dma_alloc_coherent(&nic->pdev->dev, rx->count * sizeof(*rx->ring), &rx->dma,
				      GFP_KERNEL);
	rx->slots = kvcalloc(rx->count, sizeof(*rx->slots), GFP_KERNEL);
	return rx->ring && rx->slots ? 0 : -ENOMEM;
}

static void slip_rx_unmap(struct slip_nic *nic, struct slip_rx_slot *slot)
{
	dma_unmap_single(&nic->pdev->dev, slot->dma, BUFFER, DMA_FROM_DEVICE);
	slot->buffer = NULL;
}

/* Frees the ring and its buffers. The device was reset. Also after a part of slip_rx_alloc(). */
void slip_rx_release(struct slip_nic *nic)
{
	struct slip_rx *rx = &nic->rx;
	u16 at;

	for (at = 0; rx->slots && at < rx->count; at++) {
		void *buffer = rx->slots[at].buffer;

		if (!buffer)
			continue;
		slip_rx_unmap(nic, &rx->slots[at]);
		skb_free_frag(buffer);
	}
	if (rx->ring)
		dma_free_coherent(&nic->pdev->dev, rx->count * sizeof(*rx->ring), rx->ring,
				  rx->dma);
	kvfree(rx->slots);
	dev_kfree_skb(rx->skb);
	rx->skb = NULL;
	rx->ring = NULL;
	rx->slots = NULL;
}

static bool slip_rx_renew(struct slip_nic *nic, u16 at, bool polled)
{
	struct slip_rx_slot *slot = &nic->rx.slots[at];
	struct slip_desc *desc = &nic->rx.ring[at];
	void *buffer = polled ? napi_alloc_frag(TRUESIZE) : netdev_alloc_frag(TRUESIZE);
	dma_addr_t dma;

	if (!buffer)
		return false;
	dma = dma_map_single(&nic->pdev->dev, buffer + HEADROOM, BUFFER, DMA_FROM_DEVICE);
	if (dma_mapping_error(&nic->pdev->dev, dma)) {
		skb_free_frag(buffer);
		return false;
	}
	slot->buffer = buffer;
	slot->dma = dma;
	desc->address = cpu_to_le64(dma);
	desc->length = 0;
	desc->status = 0;
	return true;
}

/* Descriptors without a buffer. One always is: a tail equal to the head means an empty ring. */
static u16 slip_rx_missing(const struct slip_rx *rx)
{
	return rx->count - 1 - slip_steps(rx->next, rx->fill, rx->count);
}

/* Gives new buffers to the device. */
static void slip_rx_fill(struct slip_nic *nic, bool polled)
{
	struct slip_rx *rx = &nic->rx;
	u16 before = rx->fill;

	while (slip_rx_missing(rx)) {
		if (!slip_rx_renew(nic, rx->fill, polled)) {
			nic->stats.rx_no_memory++;
			break;
		}
		rx->fill = slip_after(rx->fill, rx->count);
	}
	if (rx->fill == before)
		return;
	if (nic->csb) {
		slip_csb_receive(nic, rx->fill);
		return;
	}
	nic->stats.rdt_writes++;
	slip_set(nic, REG_RDT, rx->fill);
}

/*
 * Returns whether the device has no buffer at all: then no frame comes that has the ring filled
 * again.
 */
bool slip_rx_starves(struct slip_nic *nic)
{
	return nic->rx.next == nic->rx.fill;
}

/* Gives a full ring to the device, which was reset. */
void slip_rx_start(struct slip_nic *nic)
{
	struct slip_rx *rx = &nic->rx;

	rx->next = 0;
	rx->fill = 0;
	rx->drop = false;
	slip_set(nic, REG_RDBAL, lower_32_bits(rx->dma));
	slip_set(nic, REG_RDBAH, upper_32_bits(rx->dma));
	slip_set(nic, REG_RDLEN, rx->count * sizeof(*rx->ring));
	slip_set(nic, REG_RDH, 0);
	slip_set(nic, REG_RDT, 0);
	slip_set(nic, REG_RDTR, 0);
	slip_set(nic, REG_RADV, 0);
	slip_rx_fill(nic, false);
}

/* Returns whether a frame, or a part of one, has come. */
bool slip_rx_waits(struct slip_nic *nic)
{
	const struct slip_rx *rx = &nic->rx;

	return rx->next != rx->fill && le32_to_cpu(READ_ONCE(rx->ring[rx->next].status)) & RXD_DD;
}

/* Appends an skb to the list of the frame at hand, whose last one is full. */
static bool slip_rx_chain(struct slip_rx *rx)
{
	struct sk_buff *more = alloc_skb(0, GFP_ATOMIC);

	if (!more)
		return false;
	if (rx->last == rx->skb)
		skb_shinfo(rx->skb)->frag_list = more;
	else
		rx->last->next = more;
	rx->last = more;
	rx->skb->truesize += more->truesize;
	return true;
}

/*
 * Appends a descriptor's buffer to the frame at hand. Returns false if the frame is lost; the
 * buffer is used up.
 */
static bool slip_rx_append(struct slip_nic *nic, void *buffer, u32 len)
{
	struct slip_rx *rx = &nic->rx;

	if (!rx->skb) {
		rx->skb = napi_build_skb(buffer, TRUESIZE);
		if (!rx->skb)
			goto lost;
		skb_reserve(rx->skb, HEADROOM);
		skb_put(rx->skb, len);
		rx->last = rx->skb;
		return true;
	}
	if (rx->skb->len + len > LONGEST ||
	    (skb_shinfo(rx->last)->nr_frags == MAX_SKB_FRAGS && !slip_rx_chain(rx)))
		goto lost;
	skb_add_rx_frag(rx->last, skb_shinfo(rx->last)->nr_frags, virt_to_head_page(buffer),
			buffer + HEADROOM - page_address(virt_to_head_page(buffer)), len, TRUESIZE);
	if (rx->last != rx->skb) {
		rx->skb->len += len;
		rx->skb->data_len += len;
		rx->skb->truesize += TRUESIZE;
	}
	return true;

lost:
	skb_free_frag(buffer);
	return false;
}

static void slip_rx_checksum(struct slip_nic *nic, struct sk_buff *skb, u32 status)
{
	skb_checksum_none_assert(skb);
	if (status & RXD_IXSM || !(status & RXD_TCPCS))
		return;
	/* The stack looks at a frame that is bad itself, and counts it. */
	if (status & RXD_ERROR_TCPE) {
		nic->stats.rx_checksums_bad++;
		return;
	}
	nic->stats.rx_checksums_good++;
	skb->ip_summed = CHECKSUM_UNNECESSARY;
}

/*
 * Takes the header off a frame, and tells the stack what the sender has left to do. Returns false
 * for a header that does not suit its frame.
 */
static bool slip_rx_header(struct slip_nic *nic, struct sk_buff *skb)
{
	struct virtio_net_hdr header;

	if (!nic->header)
		return true;
	memcpy(&header, skb->data, sizeof(header));
	skb_pull(skb, nic->header);
	if (!(header.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM))
		return header.gso_type == VIRTIO_NET_HDR_GSO_NONE;
	/* Linux 6.1 takes any place for its own, and the sender is a stranger. */
	if (le16_to_cpu((__force __le16)header.csum_start) < ETH_HLEN + sizeof(struct iphdr))
		return false;
	nic->stats.rx_segments += header.gso_type != VIRTIO_NET_HDR_GSO_NONE;
	skb->dev = nic->netdev;
	return !virtio_net_hdr_to_skb(skb, &header, true);
}

/* Gives a whole frame to the stack, or drops it. */
static void slip_rx_deliver(struct slip_nic *nic, u32 status)
{
	struct net_device *netdev = nic->netdev;
	struct sk_buff *skb = nic->rx.skb;

	nic->rx.skb = NULL;
	if (!slip_rx_header(nic, skb)) {
		netdev->stats.rx_errors++;
		dev_kfree_skb(skb);
		return;
	}
	netdev->stats.rx_packets++;
	netdev->stats.rx_bytes += skb->len;
	if (netdev->features & NETIF_F_RXCSUM && skb->ip_summed == CHECKSUM_NONE)
		slip_rx_checksum(nic, skb, status);
	if (status & RXD_VP)
		__vlan_hwaccel_put_tag(skb, htons(ETH_P_8021Q), status >> RXD_TAG);
	skb->protocol = eth_type_trans(skb, netdev);
	napi_gro_receive(&nic->napi, skb);
}

/* Takes one descriptor that is done. Returns whether a frame has ended with it. */
static bool slip_rx_take(struct slip_nic *nic)
{
	struct slip_rx *rx = &nic->rx;
	struct slip_rx_slot *slot = &rx->slots[rx->next];
	struct slip_desc *desc = &rx->ring[rx->next];
	void *buffer = slot->buffer;
	u32 status, len;

	dma_rmb();	/* the status before what it says is there */
	status = le32_to_cpu(desc->status);
	/* The upper half is the packet checksum. */
	len = min_t(u32, le32_to_cpu(desc->length) & 0xffff, BUFFER);
	slip_rx_unmap(nic, slot);
	rx->next = slip_after(rx->next, rx->count);
	if (rx->drop)
		skb_free_frag(buffer);
	else
		rx->drop = !slip_rx_append(nic, buffer, len);
	if (!(status & RXD_EOP))
		return false;
	if (!rx->drop && !(status & RXD_ERROR_BAD) && skb_headlen(rx->skb) >= nic->header + ETH_HLEN) {
		slip_rx_deliver(nic, status);
		return true;
	}
	rx->drop = false;
	nic->netdev->stats.rx_errors++;
	dev_kfree_skb(rx->skb);
	rx->skb = NULL;
	return true;
}

/* Takes up to @budget frames. Returns their number. */
int slip_rx_poll(struct slip_nic *nic, int budget)
{
	struct slip_rx *rx = &nic->rx;
	int frames = 0;

	while (frames < budget && slip_rx_waits(nic)) {
		frames += slip_rx_take(nic);
		if (slip_rx_missing(rx) >= BATCH)
			slip_rx_fill(nic, true);
	}
	/* After a want of memory there may be no frame that fits what the ring has. */
	if (slip_rx_missing(rx) >= BATCH || slip_rx_starves(nic))
		slip_rx_fill(nic, true);
	return frames;
}
