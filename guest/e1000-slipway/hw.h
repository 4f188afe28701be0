/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Registers and descriptors of the 82540EM. Names and section numbers are those of Intel's
 * PCI/PCI-X Family of Gigabit Ethernet Controllers Software Developer's Manual (317453, revision
 * 4.0); spec/e1000-spec has the same in Rust.
 */
#ifndef SLIP_HW_H
#define SLIP_HW_H

#include <linux/bits.h>
#include <linux/types.h>

/* Offsets in BAR 0 (table 13-2). */
#define REG_CTRL	0x0000
#define REG_STATUS	0x0008
#define REG_EERD	0x0014
#define REG_MDIC	0x0020
#define REG_ICR		0x00c0
#define REG_ITR		0x00c4
#define REG_ICS		0x00c8
#define REG_IMS		0x00d0
#define REG_IMC		0x00d8
#define REG_RCTL	0x0100
#define REG_TCTL	0x0400
#define REG_TIPG	0x0410
#define REG_RDBAL	0x2800
#define REG_RDBAH	0x2804
#define REG_RDLEN	0x2808
#define REG_RDH		0x2810
#define REG_RDT		0x2818
#define REG_RDTR	0x2820
#define REG_RADV	0x282c
#define REG_CSBAL	0x2830	/* extension: the communication status block */
#define REG_CSBAH	0x2834
#define REG_CSBK	0x2838
#define REG_TDBAL	0x3800
#define REG_TDBAH	0x3804
#define REG_TDLEN	0x3808
#define REG_TDH		0x3810
#define REG_TDT		0x3818
#define REG_TIDV	0x3820
#define REG_TADV	0x382c
#define REG_MPC		0x4010	/* statistics: missed packets; a read clears it */
#define REG_RXCSUM	0x5000
#define REG_MTA(n)	(0x5200 + 4 * (n))
#define REG_RAL(n)	(0x5400 + 8 * (n))
#define REG_RAH(n)	(0x5404 + 8 * (n))

#define CTRL_FD		BIT(0)
#define CTRL_ASDE	BIT(5)
#define CTRL_SLU	BIT(6)
#define CTRL_RST	BIT(26)
#define CTRL_VME	BIT(30)

#define STATUS_LU	BIT(1)

#define EERD_START	BIT(0)
#define EERD_DONE	BIT(4)
#define EERD_ADDRESS	8	/* bits below the word's number */
#define EERD_DATA	16	/* bits below the word */
#define EEPROM_SUM	0xbaba	/* of the first 64 words */
#define EEPROM_WORDS	64

/* Access to the PHY, whose address is 1 (section 13.4.6). */
#define MDIC_WRITE	BIT(26)
#define MDIC_READY	BIT(28)
#define MDIC_PHY	BIT(21)
#define MDIC_REGISTER	16

/* Interrupt causes (section 13.4.17). */
#define CAUSE_TXDW	BIT(0)
#define CAUSE_LSC	BIT(2)
#define CAUSE_RXDMT0	BIT(4)
#define CAUSE_RXO	BIT(6)
#define CAUSE_RXT0	BIT(7)

#define RCTL_EN		BIT(1)
#define RCTL_UPE	BIT(3)
#define RCTL_MPE	BIT(4)
#define RCTL_LPE	BIT(5)
#define RCTL_BAM	BIT(15)
#define RCTL_SECRC	BIT(26)	/* buffer size bits are 0: 2048 bytes */

#define TCTL_EN		BIT(1)
#define TCTL_PSP	BIT(3)
#define TCTL_CT		(0x0f << 4)
#define TCTL_COLD	(0x40 << 12)

/* Inter packet gap of copper (section 13.4.34). */
#define TIPG_COPPER	(10 | 8 << 10 | 6 << 20)

#define RXCSUM_IPOFL	BIT(8)
#define RXCSUM_TUOFL	BIT(9)

#define RAH_AV		BIT(31)

#define MTA_WORDS	128
#define RECEIVE_ADDRESSES 16

/* ITR counts 256 ns, in 16 bits (section 13.4.18). */
#define ITR_UNIT_NS	256
#define ITR_MAX		0xffff

/*
 * A descriptor of either ring. The third and fourth word of a transmit descriptor are (sections
 * 3.3.3, 3.3.7)
 *   length | type | command, and status | options | tag;
 * of a receive descriptor (section 3.2.3) length | packet checksum, and status | errors | tag.
 */
struct slip_desc {
	__le64 address;
	__le32 length;
	__le32 status;
};

#define TXD_DATA	BIT(20)	/* type: data, if TXD_DEXT is set; else context */
#define TXD_EOP		BIT(24)
#define TXD_IFCS	BIT(25)
#define TXD_TSE		BIT(26)
#define TXD_RS		BIT(27)
#define TXD_DEXT	BIT(29)
#define TXD_VLE		BIT(30)
/* In a context descriptor (section 3.3.6). */
#define TXC_TCP		BIT(24)
#define TXC_IP		BIT(25)

#define TXD_STATUS_DD	BIT(0)
#define TXD_OPTION_IXSM	BIT(8)
#define TXD_OPTION_TXSM	BIT(9)
#define TXD_TAG		16	/* bits below the tag */

#define RXD_DD		BIT(0)
#define RXD_EOP		BIT(1)
#define RXD_IXSM	BIT(2)
#define RXD_VP		BIT(3)
#define RXD_TCPCS	BIT(5)
#define RXD_ERROR_BAD	(BIT(8) | BIT(9) | BIT(10) | BIT(15))	/* CE, SE, SEQ, RXE */
#define RXD_ERROR_TCPE	BIT(13)
#define RXD_TAG		16

#endif
