// SPDX-License-Identifier: GPL-2.0
/* Reset, EEPROM, receive filter, and the registers that have the interface's mode. */
#include <linux/delay.h>
#include <linux/etherdevice.h>
#include <linux/if_vlan.h>

#include "slip.h"

/*
 * Resets the controller. Returns false if that does not end: then the device may still use the
 * rings, and their memory must not be freed. An emulated device's reset ends when the thread that
 * moves frames has let go of them.
 */
bool slip_reset(struct slip_nic *nic)
{
	int tries;

	slip_set(nic, REG_IMC, ~0);
	slip_set(nic, REG_RCTL, 0);
	slip_set(nic, REG_TCTL, 0);
	slip_set(nic, REG_CTRL, slip_get(nic, REG_CTRL) | CTRL_RST);
	for (tries = 0; tries < 5000; tries++) {
		if (!(slip_get(nic, REG_CTRL) & CTRL_RST)) {
			slip_set(nic, REG_IMC, ~0);
			slip_get(nic, REG_ICR);
			memset(nic->mta, 0, sizeof(nic->mta));
			return true;
		}
		usleep_range(100, 1000);
	}
	netdev_err(nic->netdev, "the controller's reset does not end\n");
	return false;
}

static bool slip_eeprom_word(struct slip_nic *nic, u32 at, u16 *word)
{
	u32 value;
	int tries;

	slip_set(nic, REG_EERD, at << EERD_ADDRESS | EERD_START);
	for (tries = 0; tries < 100; tries++) {
		value = slip_get(nic, REG_EERD);
		if (value & EERD_DONE) {
			*word = value >> EERD_DATA;
			return true;
		}
		udelay(10);
	}
	return false;
}

/* Reads the EEPROM. Returns whether its sum is right. */
bool slip_eeprom_read(struct slip_nic *nic, u16 words[EEPROM_WORDS])
{
	u16 sum = 0;
	u32 at;

	for (at = 0; at < EEPROM_WORDS; at++) {
		if (!slip_eeprom_word(nic, at, &words[at]))
			return false;
		sum += words[at];
	}
	return sum == EEPROM_SUM;
}

static void slip_receive_address(struct slip_nic *nic, u8 address[ETH_ALEN])
{
	u32 low = slip_get(nic, REG_RAL(0));
	u32 high = slip_get(nic, REG_RAH(0));

	put_unaligned_le32(low, address);
	put_unaligned_le16(high, address + 4);
}

/*
 * Takes the address of the EEPROM, else what is in the first receive address, else a random one.
 */
void slip_read_address(struct slip_nic *nic)
{
	u16 words[EEPROM_WORDS];
	u8 address[ETH_ALEN];
	int at;

	if (slip_eeprom_read(nic, words)) {
		for (at = 0; at < 3; at++)
			put_unaligned_le16(words[at], address + 2 * at);
	} else {
		dev_warn(&nic->pdev->dev, "the EEPROM's sum is wrong\n");
		slip_receive_address(nic, address);
	}
	if (is_valid_ether_addr(address))
		eth_hw_addr_set(nic->netdev, address);
	else
		eth_hw_addr_random(nic->netdev);
}

static void slip_set_address(struct slip_nic *nic, int at, const u8 *address)
{
	/* In this order a valid pair never has halves of two addresses. */
	slip_set(nic, REG_RAH(at), 0);
	if (!address)
		return;
	slip_set(nic, REG_RAL(at), get_unaligned_le32(address));
	slip_set(nic, REG_RAH(at), get_unaligned_le16(address + 4) | RAH_AV);
}

/* Sets the multicast table's bits: bits 47:36 of an address (section 13.5.1, MO 0). */
static void slip_set_groups(struct slip_nic *nic)
{
	struct netdev_hw_addr *group;
	u32 table[MTA_WORDS] = {};
	u32 at;

	netdev_for_each_mc_addr(group, nic->netdev) {
		u32 hash = get_unaligned_le16(group->addr + 4) >> 4;

		table[hash >> 5] |= BIT(hash & 31);
	}
	for (at = 0; at < MTA_WORDS; at++) {
		if (table[at] != nic->mta[at])
			slip_set(nic, REG_MTA(at), table[at]);
	}
	memcpy(nic->mta, table, sizeof(table));
}

/* Sets further unicast addresses. Returns whether they fit. */
static bool slip_set_unicast(struct slip_nic *nic)
{
	struct netdev_hw_addr *other;
	int at = 1;

	if (netdev_uc_count(nic->netdev) >= RECEIVE_ADDRESSES)
		return false;
	netdev_for_each_uc_addr(other, nic->netdev)
		slip_set_address(nic, at++, other->addr);
	while (at < RECEIVE_ADDRESSES && slip_get(nic, REG_RAH(at)) & RAH_AV)
		slip_set_address(nic, at++, NULL);
	return true;
}

static u32 slip_rctl(struct slip_nic *nic)
{
	struct net_device *netdev = nic->netdev;
	u32 rctl = RCTL_EN | RCTL_BAM | RCTL_SECRC;

	/* Frames of VLANs may be 4 bytes longer without this, too. */
	if (netdev->mtu > ETH_DATA_LEN)
		rctl |= RCTL_LPE;
	if (netdev->flags & IFF_PROMISC)
		rctl |= RCTL_UPE | RCTL_MPE;
	if (netdev->flags & IFF_ALLMULTI)
		rctl |= RCTL_MPE;
	return rctl;
}

/*
 * Sets the receive filter, and the longest frame. Enables the receiver: the ring has been set up.
 */
void slip_set_filter(struct slip_nic *nic)
{
	u32 rctl = slip_rctl(nic);

	slip_set_address(nic, 0, nic->netdev->dev_addr);
	slip_set_groups(nic);
	if (!slip_set_unicast(nic))
		rctl |= RCTL_UPE;
	slip_set(nic, REG_RCTL, rctl);
}

/*
 * Sets what users may change while the interface is up: tags, checksums, the interval of
 * interrupts.
 */
void slip_set_mode(struct slip_nic *nic)
{
	netdev_features_t features = nic->netdev->features;
	u32 ctrl = CTRL_FD | CTRL_ASDE | CTRL_SLU;

	/* Without this bit tags are neither stripped nor inserted. */
	if (features & NETIF_F_HW_VLAN_CTAG_RX)
		ctrl |= CTRL_VME;
	slip_set(nic, REG_CTRL, ctrl);
	slip_set(nic, REG_RXCSUM, features & NETIF_F_RXCSUM ? RXCSUM_IPOFL | RXCSUM_TUOFL : 0);
	slip_set(nic, REG_ITR, nic->itr);
}
