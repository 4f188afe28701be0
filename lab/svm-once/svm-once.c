// SPDX-License-Identifier: GPL-2.0
// Keeps a defect of QEMU's emulation of AMD-V from the guests of an emulated server.
//
// QEMU delivers an interrupt that KVM injects (EVENTINJ) at once, but keeps its vector as the number of an exception
// until the guest's next exit: whatever ends the run of translated code before that delivers it again
// (lab/README.md, "Interrupts that come twice"). This module sees to it that the guest leaves before its first
// instruction: an interrupt of the host is pending at each VMRUN that injects one. The guest then goes on without
// anything injected.
#include <linux/hash.h>
#include <linux/irq_work.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/percpu.h>

#define BITS 8
// The threads of virtual CPUs whose next VMRUN injects an interrupt. One may be preempted until then, so this is not
// kept for each processor. Of two threads with the same place the later one has it.
static struct task_struct *injecting[1 << BITS];
static DEFINE_PER_CPU(struct irq_work, leave);

static void nothing(struct irq_work *work) {}

static struct task_struct **place(void)
{
	return &injecting[hash_ptr(current, BITS)];
}

// svm_inject_irq: KVM will inject an interrupt at this thread's next VMRUN.
static int on_inject(struct kprobe *probe, struct pt_regs *regs)
{
	WRITE_ONCE(*place(), current);
	return 0;
}

// svm_vcpu_run: the CPU's interrupts are off until VMRUN, so that the work's own interrupt is pending there.
static int on_run(struct kprobe *probe, struct pt_regs *regs)
{
	if (READ_ONCE(*place()) == current) {
		WRITE_ONCE(*place(), NULL);
		irq_work_queue(this_cpu_ptr(&leave));
	}
	return 0;
}

static struct kprobe inject = { .symbol_name = "svm_inject_irq", .pre_handler = on_inject };
static struct kprobe run = { .symbol_name = "svm_vcpu_run", .pre_handler = on_run };
static struct kprobe *probes[] = { &inject, &run };

static int __init svm_once_init(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		init_irq_work(per_cpu_ptr(&leave, cpu), nothing);
	return register_kprobes(probes, ARRAY_SIZE(probes));
}

static void __exit svm_once_exit(void)
{
	int cpu;

	unregister_kprobes(probes, ARRAY_SIZE(probes));
	for_each_possible_cpu(cpu)
		irq_work_sync(per_cpu_ptr(&leave, cpu));
}

module_init(svm_once_init);
module_exit(svm_once_exit);
MODULE_DESCRIPTION("An exit behind each interrupt that KVM injects, for QEMU's emulation of AMD-V");
MODULE_LICENSE("GPL");
