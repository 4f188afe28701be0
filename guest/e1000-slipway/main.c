// SPDX-License-Identifier: GPL-2.0
/*
 * A driver of Intel's 82540EM for guests of Slipway, and of any other emulator. It knows what a
 * register access costs a guest: an exit. slip.h says how the files divide the work.
 */
#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/if_vlan.h>
#include <linux/module.h>
#include <linux/rtnetlink.h>
#include <linux/tcp.h>

#include "slip.h"

/* What interrupts: frames received and sent, few or no receive buffers, the link. */
#define CAUSES	(CAUSE_RXT0 | CAUSE_RXDMT0 | CAUSE_RXO | CAUSE_TXDW | CAUSE_LSC)

static bool combine;
module_param(combine, bool, 0444);
MODULE_PARM_DESC(combine,
		 "send combining of new interfaces (default: off; private flag send-combining)");

static int lazy = -1;
module_param(lazy, int, 0444);
MODULE_PARM_DESC(lazy,
		 "lazy transmit completion: 0, 1 (default: with the block; private flag lazy-tx)");

static bool csb = true;
module_param(csb, bool, 0444);
MODULE_PARM_DESC(csb,
		 "use the block of devices that have one (default: on; private flag csb)");

static unsigned int itr = 50;
module_param(itr, uint, 0444);
MODULE_PARM_DESC(itr,
		 "least microseconds between interrupts (default: 50; ethtool -C rx-usecs)");

unsigned int slip_combine_rate = 5000;
module_param_named(combine_rate, slip_combine_rate, uint, 0644);
MODULE_PARM_DESC(combine_rate,
		 "frames per second from which on sends are combined (default: 5000)");

void slip_check_link(struct slip_nic *nic)
{
	bool up = slip_get(nic, REG_STATUS) & STATUS_LU;

	if (up == netif_carrier_ok(nic->netdev))
		return;
	if (up)
		netif_carrier_on(nic->netdev);
	else
		netif_carrier_off(nic->netdev);
	netdev_info(nic->netdev, "link %s\n", up ? "up, 1000 Mbit/s" : "down");
}

/* Lets no interrupt come while the poll runs. */
static void slip_mask(struct slip_nic *nic)
{
	if (nic->csb)
		slip_csb_want(nic, false, false);
	else
		slip_set(nic, REG_IMC, CAUSES & ~CAUSE_LSC);
}

/*
 * Returns whether sent frames are to interrupt: with lazy completion only if the stack waits for
 * room.
 */
static bool slip_wants_sent(struct slip_nic *nic)
{
	return !(nic->flags & SLIP_FLAG_LAZY) || netif_queue_stopped(nic->netdev);
}

/*
 * Lets interrupts come again: causes that were set meanwhile interrupt at once. With the block
 * nothing was set meanwhile, so the rings are looked at once more.
 */
static void slip_unmask(struct slip_nic *nic)
{
	bool sent;

	if (nic->flags & SLIP_FLAG_POLL)
		return;
	if (!nic->csb) {
		slip_set(nic, REG_IMS, CAUSES);
		return;
	}
	do {
		sent = slip_wants_sent(nic);
		slip_csb_want(nic, sent, true);
		/* The queue may have been stopped between the two, and its word overwritten. */
	} while (sent != slip_wants_sent(nic));
	if ((slip_rx_waits(nic) || (sent && slip_csb_sent(nic) != READ_ONCE(nic->tx.clean))) &&
	    napi_schedule_prep(&nic->napi)) {
		slip_mask(nic);
		__napi_schedule(&nic->napi);
	}
}

static irqreturn_t slip_interrupt(int irq, void *data)
{
	struct slip_nic *nic = data;
	/* This clears the causes, and the pin falls. */
	u32 causes = slip_get(nic, REG_ICR);

	if (!(causes & CAUSES))
		return IRQ_NONE;
	nic->stats.interrupts++;
	if (causes & CAUSE_LSC)
		slip_check_link(nic);
	/* Causes that do not interrupt are set in polling, too, when the link's does. */
	if (causes & ~CAUSE_LSC && !(nic->flags & SLIP_FLAG_POLL) &&
	    napi_schedule_prep(&nic->napi)) {
		slip_mask(nic);
		__napi_schedule(&nic->napi);
	}
	return IRQ_HANDLED;
}

static int slip_poll(struct napi_struct *napi, int budget)
{
	struct slip_nic *nic = container_of(napi, struct slip_nic, napi);
	int frames;

	nic->stats.polls++;
	if (nic->flags & SLIP_FLAG_POLL)
		return slip_polling_poll(nic, budget);
	slip_tx_poll(nic, budget);
	frames = budget ? slip_rx_poll(nic, budget) : 0;
	if (frames == budget || slip_rx_starves(nic))
		return budget;
	if (napi_complete_done(napi, frames))
		slip_unmask(nic);
	return frames;
}

static void slip_free(struct slip_nic *nic)
{
	slip_tx_release(nic);
	slip_rx_release(nic);
	slip_csb_free(nic);
}

/* Starts the reset controller: rings first, the receiver last. */
static void slip_start(struct slip_nic *nic)
{
	struct net_device *netdev = nic->netdev;

	slip_set_mode(nic);
	slip_csb_start(nic);
	slip_tx_start(nic);
	slip_rx_start(nic);
	netif_addr_lock_bh(netdev);
	nic->runs = true;
	slip_set_filter(nic);
	netif_addr_unlock_bh(netdev);
	napi_enable(&nic->napi);
	slip_set(nic, REG_IMS, nic->flags & SLIP_FLAG_POLL ? CAUSE_LSC : CAUSES);
	slip_unmask(nic);
	slip_polling_start(nic);
	netif_start_queue(netdev);
	slip_check_link(nic);
}

int slip_up(struct slip_nic *nic)
{
	int error = -EIO;

	if (!slip_reset(nic))
		return error;
	/* After a reset that did not end when the interface went down, the device was without. */
	pci_set_master(nic->pdev);
	error = slip_tx_alloc(nic) ?: slip_rx_alloc(nic);
	if (!error)
		error = request_irq(nic->pdev->irq, slip_interrupt, IRQF_SHARED, nic->netdev->name,
				    nic);
	if (error) {
		slip_free(nic);
		return error;
	}
	slip_start(nic);
	return 0;
}

void slip_down(struct slip_nic *nic)
{
	struct net_device *netdev = nic->netdev;

	netif_addr_lock_bh(netdev);
	nic->runs = false;
	netif_addr_unlock_bh(netdev);
	slip_polling_stop(nic);
	/* Before the queue stops: a poll would wake it again. */
	napi_disable(&nic->napi);
	netif_tx_disable(netdev);
	/* The reset clears the count. */
	atomic64_add(slip_get(nic, REG_MPC), &nic->missed);
	if (!slip_reset(nic)) {
		/* No DMA from here on, whatever the device is up to. */
		pci_clear_master(nic->pdev);
	}
	free_irq(nic->pdev->irq, nic);
	/* No interrupt says otherwise any more. */
	netif_carrier_off(netdev);
	slip_free(nic);
}

static int slip_open(struct net_device *netdev)
{
	return slip_up(netdev_priv(netdev));
}

static int slip_stop(struct net_device *netdev)
{
	struct slip_nic *nic = netdev_priv(netdev);

	/* It does not run after a restart that failed. */
	if (nic->runs)
		slip_down(nic);
	return 0;
}

static void slip_restart_now(struct slip_nic *nic)
{
	slip_down(nic);
	if (slip_up(nic))
		netdev_err(nic->netdev, "cannot start again; set the interface down and up\n");
}

static void slip_restart(struct work_struct *work)
{
	struct slip_nic *nic = container_of(work, struct slip_nic, restart);

	rtnl_lock();
	if (nic->runs)
		slip_restart_now(nic);
	rtnl_unlock();
}

static void slip_tx_timeout(struct net_device *netdev, unsigned int queue)
{
	struct slip_nic *nic = netdev_priv(netdev);

	netdev_err(netdev, "sending has stopped at %u, reclaimed to %u, told %u; starting again\n",
		   nic->tx.next, nic->tx.clean, nic->tx.told);
	schedule_work(&nic->restart);
}

static void slip_set_rx_mode(struct net_device *netdev)
{
	struct slip_nic *nic = netdev_priv(netdev);

	/* While the ring is away the receiver stays off. */
	if (nic->runs)
		slip_set_filter(nic);
}

static void slip_filter_again(struct slip_nic *nic)
{
	netif_addr_lock_bh(nic->netdev);
	slip_set_rx_mode(nic->netdev);
	netif_addr_unlock_bh(nic->netdev);
}

static int slip_set_mac(struct net_device *netdev, void *data)
{
	struct sockaddr *address = data;

	if (!is_valid_ether_addr(address->sa_data))
		return -EADDRNOTAVAIL;
	eth_hw_addr_set(netdev, address->sa_data);
	slip_filter_again(netdev_priv(netdev));
	return 0;
}

static int slip_change_mtu(struct net_device *netdev, int mtu)
{
	netdev->mtu = mtu;
	slip_filter_again(netdev_priv(netdev));
	return 0;
}

/* One bit of the controller has stripping and inserting of tags. */
static netdev_features_t slip_fix_features(struct net_device *netdev, netdev_features_t features)
{
	if (!(features & NETIF_F_HW_VLAN_CTAG_RX))
		features &= ~NETIF_F_HW_VLAN_CTAG_TX;
	return features;
}

static int slip_set_features(struct net_device *netdev, netdev_features_t features)
{
	struct slip_nic *nic = netdev_priv(netdev);
	bool had = slip_csb_wants_offloads(nic);

	netdev->features = features;
	if (!nic->runs)
		return 1;	/* the features are set */
	if (!nic->csb || slip_csb_wants_offloads(nic) == had) {
		slip_set_mode(nic);
		return 1;
	}
	/* The block says from its start on how frames are received. */
	slip_restart_now(nic);
	return 1;
}

/* A context has 8 bits for the place of each header, and for the headers' length. */
static netdev_features_t slip_check_features(struct sk_buff *skb, struct net_device *netdev,
					     netdev_features_t features)
{
	if (skb->ip_summed == CHECKSUM_PARTIAL &&
	    skb_checksum_start_offset(skb) + skb->csum_offset > SLIP_HEADERS_MAX)
		features &= ~(NETIF_F_CSUM_MASK | NETIF_F_GSO_MASK);
	if (skb_is_gso(skb) && skb_tcp_all_headers(skb) > SLIP_HEADERS_MAX)
		features &= ~NETIF_F_GSO_MASK;
	return vlan_features_check(skb, features);
}

static void slip_get_stats(struct net_device *netdev, struct rtnl_link_stats64 *stats)
{
	struct slip_nic *nic = netdev_priv(netdev);

	netdev_stats_to_stats64(stats, &netdev->stats);
	/* A read clears the register. */
	stats->rx_missed_errors = atomic64_add_return(slip_get(nic, REG_MPC), &nic->missed);
}

static const struct net_device_ops slip_ops = {
	.ndo_open		= slip_open,
	.ndo_stop		= slip_stop,
	.ndo_start_xmit		= slip_xmit,
	.ndo_tx_timeout		= slip_tx_timeout,
	.ndo_set_rx_mode	= slip_set_rx_mode,
	.ndo_set_mac_address	= slip_set_mac,
	.ndo_change_mtu		= slip_change_mtu,
	.ndo_fix_features	= slip_fix_features,
	.ndo_set_features	= slip_set_features,
	.ndo_features_check	= slip_check_features,
	.ndo_get_stats64	= slip_get_stats,
	.ndo_validate_addr	= eth_validate_addr,
};

static void slip_set_up_netdev(struct slip_nic *nic)
{
	struct net_device *netdev = nic->netdev;
	netdev_features_t offloads = NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_TSO | NETIF_F_TSO6;

	netdev->netdev_ops = &slip_ops;
	netdev->ethtool_ops = &slip_ethtool_ops;
	netdev->hw_features = offloads | NETIF_F_RXCSUM | NETIF_F_HW_VLAN_CTAG_RX |
			      NETIF_F_HW_VLAN_CTAG_TX;
	if (slip_csb_offered(nic))
		netdev->hw_features |= NETIF_F_GRO_HW;
	netdev->features = netdev->hw_features | NETIF_F_HIGHDMA;
	netdev->vlan_features = offloads | NETIF_F_HIGHDMA;
	netdev->priv_flags |= IFF_UNICAST_FLT;
	netdev->min_mtu = ETH_MIN_MTU;
	netdev->max_mtu = SLIP_MTU_MAX;
	netif_napi_add(netdev, &nic->napi, slip_poll);
}

static void slip_set_defaults(struct slip_nic *nic)
{
	nic->tx.count = SLIP_RING_DEFAULT;
	nic->rx.count = SLIP_RING_DEFAULT;
	nic->itr = min_t(u64, (u64)itr * 1000 / ITR_UNIT_NS, ITR_MAX);
	nic->flags = csb ? SLIP_FLAG_CSB : 0;
	/* They exclude each other. */
	if (combine)
		nic->flags |= SLIP_FLAG_COMBINE;
	else if (lazy > 0 || (lazy < 0 && csb && slip_csb_offered(nic)))
		nic->flags |= SLIP_FLAG_LAZY;
	INIT_WORK(&nic->restart, slip_restart);
}

static int slip_probe_registers(struct slip_nic *nic)
{
	nic->registers = pci_iomap(nic->pdev, 0, 0);
	if (!nic->registers)
		return -EIO;
	if (slip_reset(nic)) {
		slip_read_address(nic);
		return 0;
	}
	pci_iounmap(nic->pdev, nic->registers);
	return -EIO;
}

static int slip_probe_netdev(struct pci_dev *pdev)
{
	struct net_device *netdev = alloc_etherdev(sizeof(struct slip_nic));
	struct slip_nic *nic;
	int error;

	if (!netdev)
		return -ENOMEM;
	SET_NETDEV_DEV(netdev, &pdev->dev);
	pci_set_drvdata(pdev, netdev);
	nic = netdev_priv(netdev);
	nic->netdev = netdev;
	nic->pdev = pdev;
	slip_set_defaults(nic);
	error = slip_probe_registers(nic);
	if (error)
		goto free;
	slip_set_up_netdev(nic);
	netif_carrier_off(netdev);
	error = register_netdev(netdev);
	if (error)
		goto unmap;
	netdev_info(netdev, "%pM, %s a communication status block\n", netdev->dev_addr,
		    slip_csb_offered(nic) ? "with" : "without");
	return 0;

unmap:
	pci_iounmap(pdev, nic->registers);
free:
	free_netdev(netdev);
	return error;
}

static int slip_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int error = pci_enable_device_mem(pdev);

	if (error)
		return error;
	error = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (error)
		goto disable;
	error = pci_request_mem_regions(pdev, SLIP_NAME);
	if (error)
		goto disable;
	pci_set_master(pdev);
	error = slip_probe_netdev(pdev);
	if (!error)
		return 0;
	pci_release_mem_regions(pdev);
disable:
	pci_disable_device(pdev);
	return error;
}

static void slip_remove(struct pci_dev *pdev)
{
	struct net_device *netdev = pci_get_drvdata(pdev);
	struct slip_nic *nic = netdev_priv(netdev);

	unregister_netdev(netdev);
	cancel_work_sync(&nic->restart);
	netif_napi_del(&nic->napi);
	pci_iounmap(pdev, nic->registers);
	free_netdev(netdev);
	pci_release_mem_regions(pdev);
	pci_disable_device(pdev);
}

/* Ends all DMA before another kernel takes over the machine. */
static void slip_shutdown(struct pci_dev *pdev)
{
	struct net_device *netdev = pci_get_drvdata(pdev);

	rtnl_lock();
	netif_device_detach(netdev);
	dev_close(netdev);
	rtnl_unlock();
	pci_disable_device(pdev);
}

static const struct pci_device_id slip_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_INTEL, 0x100e) },
	{}
};
MODULE_DEVICE_TABLE(pci, slip_ids);

static struct pci_driver slip_driver = {
	.name		= SLIP_NAME,
	.id_table	= slip_ids,
	.probe		= slip_probe,
	.remove		= slip_remove,
	.shutdown	= slip_shutdown,
};
module_pci_driver(slip_driver);

MODULE_DESCRIPTION("Intel 82540EM in virtual machines, with a communication status block");
MODULE_LICENSE("GPL");
