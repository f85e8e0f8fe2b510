// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Adds memory to a running kernel when it is loaded, and takes it away again when it is unloaded: RAM that the machine has
 * and that the kernel was told to leave alone (mem= on its command line). A machine that has no hot-plug is enough for it.
 */

#include <linux/memory_hotplug.h>
#include <linux/module.h>

static unsigned long start;
module_param(start, ulong, 0444);
MODULE_PARM_DESC(start, "guest-physical address, a multiple of a memory block");

static unsigned long bytes;
module_param(bytes, ulong, 0444);
MODULE_PARM_DESC(bytes, "how much, a multiple of a memory block");

static int __init rig_hotadd_init(void)
{
	return bytes ? add_memory(0, start, bytes, MHP_NONE) : -EINVAL;
}

static void __exit rig_hotadd_exit(void)
{
	int error = offline_and_remove_memory(start, bytes);

	if (error)
		pr_err("%lu bytes at %#lx stay: %d\n", bytes, start, error);
}

module_init(rig_hotadd_init);
module_exit(rig_hotadd_exit);
MODULE_DESCRIPTION("Adds memory that the kernel was told to leave alone");
MODULE_LICENSE("Dual BSD/GPL");
