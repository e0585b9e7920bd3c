// SPDX-License-Identifier: GPL-2.0-only
/*
 * A driver that lives on the PCI bus as NVIDIA's does, for tests: its name, its character devices
 * (major 195, the first free minor), its files below /proc/driver/nvidia, and above all a removal
 * that waits, and cannot be killed, for as long as somebody has a card open or mapped.
 *
 * It claims QEMU's NVMe controllers. Parameters: fail_probe=ADDRESS, probe_ms=N (how long each
 * probe takes), stuck=ADDRESS (a removal that does not end, whoever has gone, until this is changed).
 */
#include <linux/cdev.h>
#include <linux/delay.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>

#define MAJOR_NUMBER 195
#define MOST_CARDS 32
#define LOOK_MS 500

static char fail_probe[32];
module_param_string(fail_probe, fail_probe, sizeof(fail_probe), 0644);
static char stuck[32];
module_param_string(stuck, stuck, sizeof(stuck), 0644);
static int probe_ms;
module_param(probe_ms, int, 0644);

struct test_gpu {
	struct pci_dev *pci;
	struct cdev nodes;
	struct page *page;
	struct proc_dir_entry *folder;
	atomic_t usage;
	int minor;
};

static struct test_gpu *gpus[MOST_CARDS];
static DEFINE_MUTEX(gpus_lock);
static struct class *node_class;
static struct proc_dir_entry *driver_folder, *gpus_folder;

static int node_open(struct inode *inode, struct file *file)
{
	struct test_gpu *gpu;

	mutex_lock(&gpus_lock);
	gpu = gpus[iminor(inode)];
	if (gpu)
		atomic_inc(&gpu->usage);
	mutex_unlock(&gpus_lock);
	file->private_data = gpu;
	return gpu ? 0 : -ENODEV;
}

static int node_release(struct inode *inode, struct file *file)
{
	struct test_gpu *gpu = file->private_data;

	atomic_dec(&gpu->usage);
	return 0;
}

/* The mapping keeps the file, so a process that has closed its descriptor still holds the card. */
static int node_mmap(struct file *file, struct vm_area_struct *area)
{
	struct test_gpu *gpu = file->private_data;

	if (area->vm_end - area->vm_start != PAGE_SIZE)
		return -EINVAL;
	return vm_insert_page(area, area->vm_start, gpu->page);
}

static const struct file_operations node_operations = {
	.owner = THIS_MODULE,
	.open = node_open,
	.release = node_release,
	.mmap = node_mmap,
};

static int information_show(struct seq_file *out, void *unused)
{
	struct test_gpu *gpu = out->private;

	seq_puts(out, "Model: \t\t Test GPU\n");
	seq_printf(out, "GPU UUID: \t GPU-00000000-0000-0000-0000-%012x\n", pci_dev_id(gpu->pci));
	seq_printf(out, "Bus Type: \t PCIe\nBus Location: \t %s\n", pci_name(gpu->pci));
	seq_printf(out, "Device Minor: \t %d\nGPU Excluded:\t No\n", gpu->minor);
	return 0;
}

static int version_show(struct seq_file *out, void *unused)
{
	seq_puts(out, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build  (test)\n");
	return 0;
}

static int take_minor(struct test_gpu *gpu)
{
	int minor;

	mutex_lock(&gpus_lock);
	for (minor = 0; minor < MOST_CARDS && gpus[minor]; minor++)
		;
	if (minor < MOST_CARDS)
		gpus[minor] = gpu;
	mutex_unlock(&gpus_lock);
	return minor < MOST_CARDS ? minor : -ENOSPC;
}

static void give_minor_back(struct test_gpu *gpu)
{
	mutex_lock(&gpus_lock);
	gpus[gpu->minor] = NULL;
	mutex_unlock(&gpus_lock);
}

static int test_probe(struct pci_dev *pci, const struct pci_device_id *id)
{
	struct test_gpu *gpu;
	int result;

	if (probe_ms)
		msleep(probe_ms);
	if (!strcmp(fail_probe, pci_name(pci))) {
		dev_err(&pci->dev, "NVRM: The NVIDIA GPU %s cannot be initialized (test)\n", pci_name(pci));
		return -EIO;
	}
	gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);
	if (!gpu)
		return -ENOMEM;
	gpu->pci = pci;
	gpu->page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	result = gpu->page ? pci_enable_device(pci) : -ENOMEM;
	if (result)
		goto free;
	result = gpu->minor = take_minor(gpu);
	if (result < 0)
		goto disable;
	cdev_init(&gpu->nodes, &node_operations);
	gpu->nodes.owner = THIS_MODULE;
	result = cdev_add(&gpu->nodes, MKDEV(MAJOR_NUMBER, gpu->minor), 1);
	if (result)
		goto minor;
	pci_set_drvdata(pci, gpu);
	device_create(node_class, NULL, MKDEV(MAJOR_NUMBER, gpu->minor), NULL, "nvidia%d", gpu->minor);
	gpu->folder = proc_mkdir(pci_name(pci), gpus_folder);
	proc_create_single_data("information", 0444, gpu->folder, information_show, gpu);
	return 0;
minor:
	give_minor_back(gpu);
disable:
	pci_disable_device(pci);
free:
	if (gpu->page)
		__free_page(gpu->page);
	kfree(gpu);
	return result;
}

static bool is_busy(struct test_gpu *gpu)
{
	return atomic_read(&gpu->usage) || !strcmp(stuck, pci_name(gpu->pci));
}

static void test_remove(struct pci_dev *pci)
{
	struct test_gpu *gpu = pci_get_drvdata(pci);

	if (is_busy(gpu))
		pr_err("NVRM: Attempting to remove device %s with non-zero usage count!\n", pci_name(pci));
	while (is_busy(gpu))
		msleep(LOOK_MS);
	proc_remove(gpu->folder);
	device_destroy(node_class, MKDEV(MAJOR_NUMBER, gpu->minor));
	cdev_del(&gpu->nodes);
	give_minor_back(gpu);
	pci_disable_device(pci);
	__free_page(gpu->page);
	kfree(gpu);
}

static const struct pci_device_id test_ids[] = {
	{ PCI_DEVICE(0x1b36, 0x0010) },
	{ }
};
MODULE_DEVICE_TABLE(pci, test_ids);

static struct pci_driver test_driver = {
	.name = "nvidia",
	.id_table = test_ids,
	.probe = test_probe,
	.remove = test_remove,
};

static int __init test_init(void)
{
	int result = register_chrdev_region(MKDEV(MAJOR_NUMBER, 0), MOST_CARDS, "nvidia");

	if (result)
		return result;
	node_class = class_create(THIS_MODULE, "test-gpu");
	driver_folder = proc_mkdir("driver/nvidia", NULL);
	gpus_folder = proc_mkdir("gpus", driver_folder);
	proc_create_single("version", 0444, driver_folder, version_show);
	return pci_register_driver(&test_driver);
}

static void __exit test_exit(void)
{
	pci_unregister_driver(&test_driver);
	proc_remove(driver_folder);
	class_destroy(node_class);
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), MOST_CARDS);
}

module_init(test_init);
module_exit(test_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Stand-in for the NVIDIA driver's life on the PCI bus, for tests");
