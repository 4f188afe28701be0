// SPDX-License-Identifier: GPL-2.0
/*
 * Sending. All of the ring is under its queue's lock: the stack holds it around slip_xmit(), the
 * poll takes it.
 *
 * Three ways of making less work, by Speeding Up Packet I/O in Virtual Machines:
 *  - send combining (section 3.2): while the device has frames whose interrupt is still to come,
 *    the tail is not written; the interrupt's poll hands over all that was queued until then;
 *  - lazy completion (3.3.1): only every so many descriptors, and when the ring fills up, a frame
 *    asks for a report and so for an interrupt. A frame may stay in the ring for long, so it is no
 *    longer its socket's, and none of its bytes are lent;
 *  - the communication status block (3.5), in csb.c.
 * The first lives on interrupts that the second does without, so they exclude each other.
 *
 * There is no limit on queued bytes (BQL): a frame leaves the ring when the host's switch has it,
 * not at a wire's rate, and frames that wait to be combined would count as stuck.
 */
#include <linux/etherdevice.h>
#include <linux/if_vlan.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <net/ip6_checksum.h>
#include <net/tcp.h>

#include "slip.h"

/* Bytes of one descriptor: below the controller's limit of 16,288 (section 3.3). */
#define PIECE		8192
/* The most descriptors of a frame: its pieces, what splitting adds, and a context. */
#define FRAME_MOST	(MAX_SKB_FRAGS + 1 + GSO_LEGACY_MAX_SIZE / PIECE + 2)

/* What is the same in all descriptors of a frame. */
struct slip_frame {
	u32 command;
	u32 status;
};

int slip_tx_alloc(struct slip_nic *nic)
{
	struct slip_tx *tx = &nic->tx;
	struct device *dev = &nic->pdev->dev;

	tx->ring = dma_alloc_coherent(dev, tx->count * sizeof(*tx->ring), &tx->dma, GFP_KERNEL);
	tx->slots = kvcalloc(tx->count, sizeof(*tx->slots), GFP_KERNEL);
	tx->reports = kvcalloc(tx->count, sizeof(*tx->reports), GFP_KERNEL);
	return tx->ring && tx->slots && tx->reports ? 0 : -ENOMEM;
}

static void slip_tx_unmap(struct slip_nic *nic, struct slip_tx_slot *slot)
{
	struct device *dev = &nic->pdev->dev;

	if (!slot->len)
		return;
	if (slot->page)
		dma_unmap_page(dev, slot->dma, slot->len, DMA_TO_DEVICE);
	else
		dma_unmap_single(dev, slot->dma, slot->len, DMA_TO_DEVICE);
	slot->len = 0;
}

/* Reclaims descriptors up to @until. */
static void slip_tx_reclaim(struct slip_nic *nic, u16 until, int budget)
{
	struct slip_tx *tx = &nic->tx;

	while (tx->clean != until) {
		struct slip_tx_slot *slot = &tx->slots[tx->clean];

		slip_tx_unmap(nic, slot);
		if (slot->skb)
			napi_consume_skb(slot->skb, budget);
		slot->skb = NULL;
		tx->clean = slip_after(tx->clean, tx->count);
		tx->reclaimed++;
	}
}

/*
 * Frees the ring and all frames in it. The device was reset. Also after a part of
 * slip_tx_alloc().
 */
void slip_tx_release(struct slip_nic *nic)
{
	struct slip_tx *tx = &nic->tx;

	if (tx->slots)
		slip_tx_reclaim(nic, tx->next, 0);
	if (tx->ring)
		dma_free_coherent(&nic->pdev->dev, tx->count * sizeof(*tx->ring), tx->ring,
				  tx->dma);
	kvfree(tx->slots);
	kvfree(tx->reports);
	tx->ring = NULL;
	tx->slots = NULL;
	tx->reports = NULL;
}

/* Gives an empty ring to the device, which was reset. */
void slip_tx_start(struct slip_nic *nic)
{
	struct slip_tx *tx = &nic->tx;

	tx->next = 0;
	tx->clean = 0;
	tx->reclaimed = 0;
	tx->told = 0;
	tx->unreported = 0;
	tx->report_first = 0;
	tx->report_next = 0;
	tx->fast = false;
	tx->window = jiffies;
	tx->window_frames = 0;
	memset(&tx->context, 0, sizeof(tx->context));
	slip_set(nic, REG_TDBAL, lower_32_bits(tx->dma));
	slip_set(nic, REG_TDBAH, upper_32_bits(tx->dma));
	slip_set(nic, REG_TDLEN, tx->count * sizeof(*tx->ring));
	slip_set(nic, REG_TDH, 0);
	slip_set(nic, REG_TDT, 0);
	slip_set(nic, REG_TIPG, TIPG_COPPER);
	slip_set(nic, REG_TIDV, 0);
	slip_set(nic, REG_TADV, 0);
	slip_set(nic, REG_TCTL, TCTL_EN | TCTL_PSP | TCTL_CT | TCTL_COLD);
}

/* Returns the place behind the last descriptor that the device has reported as done. */
static u16 slip_tx_done(struct slip_nic *nic)
{
	struct slip_tx *tx = &nic->tx;
	u16 done = tx->clean;

	if (nic->csb)
		return slip_csb_sent(nic);
	while (tx->report_first != tx->report_next) {
		u16 at = tx->reports[tx->report_first];

		if (!(le32_to_cpu(READ_ONCE(tx->ring[at].status)) & TXD_STATUS_DD))
			break;
		tx->report_first = slip_after(tx->report_first, tx->count);
		done = slip_after(at, tx->count);
	}
	return done;
}

/* Hands over all that is queued. */
static void slip_tx_tell(struct slip_nic *nic)
{
	struct slip_tx *tx = &nic->tx;

	if (tx->told == tx->next)
		return;
	tx->told = tx->next;
	if (nic->csb) {
		nic->stats.csb_tails++;
		if (!slip_csb_send(nic, tx->next))
			return;
	}
	nic->stats.tdt_writes++;
	slip_set(nic, nic->csb ? nic->kick_register : REG_TDT, tx->next);
}

/*
 * Returns whether frames come faster than slip_combine_rate. A frame that waits for an interrupt
 * is late, by the interval of interrupts at most; few frames gain nothing by that. A quarter of
 * the rate is enough to go on: a guest may be without its processor for a while.
 */
static bool slip_tx_is_fast(struct slip_tx *tx)
{
	unsigned long passed = jiffies - tx->window;
	u64 least = tx->fast ? slip_combine_rate / 4 : slip_combine_rate;

	tx->window_frames++;
	if (passed >= 2) {
		tx->fast = (u64)tx->window_frames * HZ >= least * passed;
		tx->window = jiffies;
		tx->window_frames = 0;
	}
	return tx->fast;
}

/* Hands over what is queued, or leaves that to the poll after the next interrupt. */
static void slip_tx_combine(struct slip_nic *nic)
{
	struct slip_tx *tx = &nic->tx;

	if ((nic->flags & SLIP_FLAG_COMBINE) && !nic->csb && slip_tx_is_fast(tx) &&
	    tx->told != tx->clean)
		nic->stats.tdt_combined++;
	else
		slip_tx_tell(nic);
}

/*
 * Stops the queue if the ring has no room for another frame of any shape. The device interrupts
 * once it has sent frames, as their descriptors' report bits or the status block's word ask for.
 * The poll after that interrupt wakes the queue.
 */
static void slip_tx_stop(struct slip_nic *nic)
{
	struct slip_tx *tx = &nic->tx;

	if (slip_tx_free(tx) >= FRAME_MOST)
		return;
	netif_stop_queue(nic->netdev);
	smp_mb();	/* so that slip_unmask() sees this, or the word is set behind its own store */
	nic->stats.tx_stopped++;
	if (!nic->csb)
		return;
	slip_csb_want_sent(nic);
	/* What was sent before the device saw the word brings no interrupt. */
	slip_tx_reclaim(nic, slip_tx_done(nic), 0);
	if (slip_tx_free(tx) >= FRAME_MOST)
		netif_start_queue(nic->netdev);
}

/* Reclaims what was sent, hands over what was to be combined, and wakes the queue. */
void slip_tx_poll(struct slip_nic *nic, int budget)
{
	struct netdev_queue *queue = netdev_get_tx_queue(nic->netdev, 0);
	struct slip_tx *tx = &nic->tx;

	__netif_tx_lock(queue, smp_processor_id());
	slip_tx_reclaim(nic, slip_tx_done(nic), budget);
	slip_tx_tell(nic);
	/* A quarter of the ring at least: else each frame of a full ring costs an interrupt. */
	if (netif_queue_stopped(nic->netdev) &&
	    slip_tx_free(tx) >= max_t(u32, tx->count / 4, FRAME_MOST))
		netif_wake_queue(nic->netdev);
	__netif_tx_unlock(queue);
}

/* Puts a context in the ring, unless the device has it. */
static void slip_tx_context(struct slip_nic *nic, u64 low, u64 high)
{
	struct slip_tx *tx = &nic->tx;
	struct slip_desc context = {
		.address = cpu_to_le64(low),
		.length = cpu_to_le32(lower_32_bits(high) | TXD_DEXT),
		.status = cpu_to_le32(upper_32_bits(high)),
	};

	if (!memcmp(&context, &tx->context, sizeof(context)))
		return;
	tx->context = context;
	tx->ring[tx->next] = context;
	tx->next = slip_after(tx->next, tx->count);
	tx->unreported++;
	nic->stats.tx_contexts++;
}

/*
 * The headers of a segment, as the controller wants them: the IP length, and the length in the
 * sum of the pseudo header, are left out (section 3.5.7).
 */
static void slip_tx_prepare_segment(struct sk_buff *skb)
{
	if (vlan_get_protocol(skb) == htons(ETH_P_IP)) {
		struct iphdr *ip = ip_hdr(skb);

		ip->tot_len = 0;
		ip->check = 0;
		tcp_hdr(skb)->check = ~csum_tcpudp_magic(ip->saddr, ip->daddr, 0, IPPROTO_TCP, 0);
	} else {
		tcp_v6_gso_csum_prep(skb);
	}
}

/* Offers a frame for segmentation. Returns an error if its headers cannot be changed. */
static int slip_tx_segment(struct slip_nic *nic, struct sk_buff *skb, struct slip_frame *frame)
{
	u32 header = skb_tcp_all_headers(skb);
	u32 ip = skb_network_offset(skb), tcp = skb_transport_offset(skb);
	bool v4 = vlan_get_protocol(skb) == htons(ETH_P_IP);
	u64 low, high;
	int error;

	/* A stranger's segment may have longer ones than slip_check_features() could see. */
	if (header > SLIP_HEADERS_MAX)
		return -EINVAL;
	error = skb_cow_head(skb, 0);
	if (error)
		return error;
	slip_tx_prepare_segment(skb);
	low = (u64)(tcp + offsetof(struct tcphdr, check)) << 40 | (u64)tcp << 32 | ip;
	if (v4)
		low |= (u64)(tcp - 1) << 16 | (ip + offsetof(struct iphdr, check)) << 8;
	high = (u64)skb_shinfo(skb)->gso_size << 48 | (u64)header << 40 | (skb->len - header);
	high |= TXD_TSE | TXC_TCP | (v4 ? TXC_IP : 0);
	slip_tx_context(nic, low, high);
	frame->command |= TXD_DEXT | TXD_DATA | TXD_TSE;
	frame->status |= TXD_OPTION_TXSM | (v4 ? TXD_OPTION_IXSM : 0);
	nic->stats.tx_segmented++;
	return 0;
}

static void slip_tx_checksum(struct slip_nic *nic, struct sk_buff *skb, struct slip_frame *frame)
{
	u64 start = skb_checksum_start_offset(skb);

	slip_tx_context(nic, (start + skb->csum_offset) << 40 | start << 32, 0);
	frame->command |= TXD_DEXT | TXD_DATA;
	frame->status |= TXD_OPTION_TXSM;
	nic->stats.tx_checksums++;
}

/* Chooses the kind of descriptors, and their offloads. */
static int slip_tx_offload(struct slip_nic *nic, struct sk_buff *skb, struct slip_frame *frame)
{
	frame->command = TXD_IFCS;
	frame->status = 0;
	if (skb_vlan_tag_present(skb)) {
		frame->command |= TXD_VLE;
		frame->status |= skb_vlan_tag_get(skb) << TXD_TAG;
	}
	if (skb_is_gso(skb))
		return slip_tx_segment(nic, skb, frame);
	if (skb->ip_summed == CHECKSUM_PARTIAL)
		slip_tx_checksum(nic, skb, frame);
	return 0;
}

/* Queues @len mapped bytes, of one mapping, in as many descriptors as they need. */
static void slip_tx_queue(struct slip_tx *tx, const struct slip_frame *frame, dma_addr_t dma,
			  u32 len, bool page)
{
	struct slip_tx_slot *first = &tx->slots[tx->next];
	u32 done, part;

	for (done = 0; done < len; done += part) {
		struct slip_desc *desc = &tx->ring[tx->next];

		part = min_t(u32, len - done, PIECE);
		desc->address = cpu_to_le64(dma + done);
		desc->length = cpu_to_le32(part | frame->command);
		desc->status = cpu_to_le32(frame->status);
		tx->next = slip_after(tx->next, tx->count);
		tx->unreported++;
	}
	first->dma = dma;
	first->len = len;
	first->page = page;
}

/*
 * Maps a frame and queues its descriptors. After an error the ring is as it was behind the
 * context.
 */
static int slip_tx_map(struct slip_nic *nic, struct sk_buff *skb, const struct slip_frame *frame)
{
	struct device *dev = &nic->pdev->dev;
	struct slip_tx *tx = &nic->tx;
	u16 first = tx->next, at;
	dma_addr_t dma;
	int number;

	dma = dma_map_single(dev, skb->data, skb_headlen(skb), DMA_TO_DEVICE);
	if (dma_mapping_error(dev, dma))
		return -ENOMEM;
	slip_tx_queue(tx, frame, dma, skb_headlen(skb), false);
	for (number = 0; number < skb_shinfo(skb)->nr_frags; number++) {
		const skb_frag_t *frag = &skb_shinfo(skb)->frags[number];

		dma = skb_frag_dma_map(dev, frag, 0, skb_frag_size(frag), DMA_TO_DEVICE);
		if (dma_mapping_error(dev, dma))
			goto unmap;
		slip_tx_queue(tx, frame, dma, skb_frag_size(frag), true);
	}
	return 0;

unmap:
	for (at = first; at != tx->next; at = slip_after(at, tx->count))
		slip_tx_unmap(nic, &tx->slots[at]);
	tx->unreported -= slip_steps(first, tx->next, tx->count);
	tx->next = first;
	return -ENOMEM;
}

/* Returns whether the frame that was queued last has to report that it was sent. */
static bool slip_tx_reports(struct slip_nic *nic)
{
	struct slip_tx *tx = &nic->tx;

	/* The head in the block says what was sent. */
	if (nic->csb)
		return false;
	return !(nic->flags & SLIP_FLAG_LAZY) || tx->unreported >= tx->count / 4 ||
	       slip_tx_free(tx) < FRAME_MOST;
}

/* Ends a frame at the descriptor that was queued last. */
static void slip_tx_end(struct slip_nic *nic, struct sk_buff *skb)
{
	struct slip_tx *tx = &nic->tx;
	u16 last = tx->next ? tx->next - 1 : tx->count - 1;
	u32 command = TXD_EOP;

	if (slip_tx_reports(nic)) {
		command |= TXD_RS;
		tx->reports[tx->report_next] = last;
		tx->report_next = slip_after(tx->report_next, tx->count);
		tx->unreported = 0;
	}
	tx->ring[last].length |= cpu_to_le32(command);
	tx->slots[last].skb = skb;
	nic->netdev->stats.tx_packets += skb_is_gso(skb) ? skb_shinfo(skb)->gso_segs : 1;
	nic->netdev->stats.tx_bytes += skb->len;
}

/*
 * Takes a frame that may stay in the ring for long from its socket. Returns an error if its bytes
 * are lent and cannot be copied.
 */
static int slip_tx_disown(struct slip_nic *nic, struct sk_buff *skb)
{
	if (!(nic->flags & SLIP_FLAG_LAZY))
		return 0;
	skb_orphan(skb);
	nf_reset_ct(skb);
	return skb_orphan_frags(skb, GFP_ATOMIC);
}

netdev_tx_t slip_xmit(struct sk_buff *skb, struct net_device *netdev)
{
	struct slip_nic *nic = netdev_priv(netdev);
	struct slip_frame frame;

	if (nic->csb || nic->flags & SLIP_FLAG_LAZY)
		slip_tx_reclaim(nic, slip_tx_done(nic), 0);
	if (unlikely(slip_tx_free(&nic->tx) < FRAME_MOST)) {
		slip_tx_stop(nic);
		return NETDEV_TX_BUSY;
	}
	if (eth_skb_pad(skb)) {
		/* It has freed the frame. Earlier ones of a batch may wait. */
		slip_tx_tell(nic);
		return NETDEV_TX_OK;
	}
	skb_tx_timestamp(skb);
	if (slip_tx_disown(nic, skb) || slip_tx_offload(nic, skb, &frame) ||
	    slip_tx_map(nic, skb, &frame)) {
		netdev->stats.tx_dropped++;
		dev_kfree_skb_any(skb);
		slip_tx_tell(nic);
		return NETDEV_TX_OK;
	}
	slip_tx_end(nic, skb);
	slip_tx_stop(nic);
	if (!netdev_xmit_more() || netif_queue_stopped(netdev))
		slip_tx_combine(nic);
	return NETDEV_TX_OK;
}
