// SPDX-License-Identifier: GPL-2.0
// Keeps a defect of QEMU's emulation of AMD-V from the guests of an emulated server.
//
// QEMU delivers an interrupt that KVM injects (EVENTINJ) at once, but keeps its vector as the number of an exception
// until the guest's next exit: whatever ends the run of translated code before that delivers it again
// (lab/README.md, "Interrupts that come twice"). This module sees to it that the guest leaves before its first
// instruction: an interrupt of the host is pending at each VMRUN that injects one. The guest then goes on without
// anything injected.
#include <linux/irq_work.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/percpu.h>

static DEFINE_PER_CPU(bool, injected);
static DEFINE_PER_CPU(struct irq_work, leave);

static void nothing(struct irq_work *work) {}

// svm_inject_irq: KVM will inject an interrupt at this CPU's next VMRUN.
static int on_inject(struct kprobe *probe, struct pt_regs *regs)
{
	__this_cpu_write(injected, true);
	return 0;
}

// svm_vcpu_run: the CPU's interrupts are off until VMRUN, so that the work's own interrupt is pending there.
static int on_run(struct kprobe *probe, struct pt_regs *regs)
{
	if (__this_cpu_read(injected)) {
		__this_cpu_write(injected, false);
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
