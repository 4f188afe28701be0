# Everything that is done with Slipway's sources. `make` alone says what there is.
#
# Set-up is part of the targets: on a Debian 12 or 13 machine with git, make and a root shell each
# of them installs what it needs, and says so.

SHELL := /bin/bash
# A Rust that the user installed for herself goes before the distribution's.
export PATH := $(HOME)/.cargo/bin:$(PATH)

PREFIX ?= /usr/local
# Where container runtimes look for CNI plugins.
CNI_BIN ?= /opt/cni/bin
TARGET := $(or $(CARGO_TARGET_DIR),target)
# The programs that are installed, but for those that are linked statically.
PROGRAMS ?= $(TARGET)/release
# What runs in guests is linked statically: the agent and the socket engine for the initramfs, slipway-load for any image.
# So are slipway-vmm, slipway-fs and slipway-cni, which start sooner without libraries. The explicit target keeps these
# flags from build scripts and macros.
HOST := x86_64-unknown-linux-gnu

.DEFAULT_GOAL := help
.PHONY: help setup core static-core static build demo shell test-programs test check docs site fuzz soak bench install node-image clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what building and running need (as root the first time)
	@deploy/setup/setup.sh build run

# A sandbox without sockets, directories of the host and benchmarks needs no more than these.
core: static-core
	cargo build --release --locked --package slipway-cli

static-core:
	@deploy/setup/setup.sh build
	RUSTFLAGS='-C target-feature=+crt-static' \
	    cargo build --profile agent --locked --package slipway-agent --bins --target $(HOST)
	@# By itself: together with slipway-load and slipway-hollow it would have their drivers.
	RUSTFLAGS='-C target-feature=+crt-static' \
	    cargo build --profile agent --locked --package slipway-vmm-process --bins --target $(HOST)

static: static-core
	RUSTFLAGS='-C target-feature=+crt-static' \
	    cargo build --profile agent --locked --package slipway-guest-sockets --package slipway-load \
	    --package slipway-fs-process --package slipway-hollow \
	    --bins --target $(HOST)
	@deploy/build-cni.sh $(TARGET) $(HOST)

build: core static ## the programs: target/release/slipway, slipway-bench, containerd's shim and snapshotter, the CNI plugin, libslipway.so, slipway-vmm, slipway-fs, slipway-hollow, those that run in guests
	cargo build --release --locked --package slipway-cli --package slipway-preload --package slipway-shim \
	    --package slipway-snapshotter
	@deploy/build-musl.sh $(TARGET) $(TARGET)/release

demo: core ## run four containers, each in a microVM of its own, and show where the time went
	@deploy/setup/setup.sh run demo
	@deploy/demo.sh $(TARGET)/release/slipway

shell: core ## a shell in a microVM, in the demo's image
	@deploy/setup/setup.sh run demo
	@deploy/demo.sh --shell $(TARGET)/release/slipway

# What is not static: as the unit tests have it, with assertions. target/tests has these programs and no others.
test-programs:
	@deploy/setup/setup.sh build
	@deploy/check/test-programs.sh $(TARGET) $(TARGET)/tests

test: ## every test: units, end to end. The programs have assertions, and checks of overflows
	@deploy/setup/setup.sh build run driver test
	@# Together: the links of static programs are one thread each.
	@$(MAKE) --no-print-directory static & static=$$!; $(MAKE) --no-print-directory test-programs; \
	    status=$$?; wait $$static && exit $$status
	@deploy/check/test.sh $(TARGET)/tests/slipway

check: ## format, lints, documents, licences, the floor rule
	@deploy/setup/setup.sh build check
	@deploy/check/check.sh

docs: ## the documentation of all crates, of which a warning is an error: target/doc
	@deploy/setup/setup.sh build
	RUSTDOCFLAGS='-D warnings' cargo doc --quiet --locked --workspace --no-deps

site: ## these documents as a site: target/site/index.html
	@deploy/setup/setup.sh site
	@/usr/bin/python3 deploy/site/build.py $(TARGET)/site

fuzz: ## fuzz every target for half an hour in all (fuzz/run --help for more)
	@deploy/setup/setup.sh build fuzz
	fuzz/run --total 1800

soak: build ## the documentation; the end-to-end tests with the programs that are installed; fuzz every target for half an hour each; an interface down and up a hundred times; DPDK in a guest; pods under kills for ten minutes; the CNI plugin under kills; fifty forks, twenty at once, and kills of forks, of snapshots and of memory and CPUs that come and go, memory of containers, crashes, restarts and given back memory on KVM; hostile guests and programs for five minutes each; memory of huge pages, whose limit on this host it raises
	@deploy/setup/setup.sh build run driver fuzz
	@$(MAKE) --no-print-directory docs
	@# `make test` runs these with programs that have assertions.
	deploy/check/test.sh $(TARGET)/release/slipway
	for test in 46-e1000 46-e1000-driver 46-guest-network; do \
	    SLIPWAY=$(TARGET)/release/slipway SLIPWAY_SOAK=1 SLIPWAY_DRIVER_ROUNDS=100 tests/e2e/$$test.sh || exit; done
	for test in 46-testpmd 71-plug; do \
	    SLIPWAY=$(TARGET)/release/slipway SLIPWAY_SOAK=1 tests/e2e/$$test.sh || exit; done
	@# With QEMU: `make test` has fewer kills, and a shorter time.
	for test in 35-restart 37-restart-sandboxes 40-crash 41-start-kills 42-plug-kills; do \
	    SLIPWAY=$(TARGET)/release/slipway SLIPWAY_RESTART_SECONDS=120 SLIPWAY_RESTART_KILLS=10 SLIPWAY_KILLS=8 \
	        tests/e2e/$$test.sh || exit; done
	cargo test --locked --package slipway-pool --package slipway-vmm-process --test pool --test numa -- --ignored
	@# Not in `make test`: for these alone, cargo compiles what they use with other features.
	cargo test --locked --doc --package slipway-warp --package slipway-port --package slipway-socket-tokio --package slipway-vfio-user
	HOSTILE_SECONDS=300 SLIPWAY=$(TARGET)/release/slipway tests/e2e/61-hostile-neighbours.sh
	SLIPWAY_HOSTILE_SECONDS=300 cargo test --locked --package slipway-vmm --test guests hostile
	SLIPWAY_CHAOS_SECONDS=60 cargo test --locked --package slipway-switch --test chaos
	lab/churn $(TARGET)/release/slipway || [ $$? = 77 ]
	lab/cni $(TARGET)/release/slipway $(TARGET)/$(HOST)/agent/slipway-cni || [ $$? = 77 ]
	@# In virtual time: many forks at once keep an emulated processor busy for longer than an agent may take to answer.
	SLIPWAY_LAB_LIMIT=14400 lab/kvm-host --icount --test 13-template-auto --test 14-forks --set SLIPWAY_FORKS_IN_ROW=50 --set SLIPWAY_FORKS_AT_ONCE=20 \
	    $(TARGET)/release/slipway || [ $$? = 77 ]
	SLIPWAY_LAB_LIMIT=14400 lab/kvm-host --test 12-bound-memory --test 13-templates --test 13-template-memory --test 14-fork-sockets --test 15-fork-kills --test 16-snapshots --test 17-snapshot-kills --test 19-image-templates --test 40-crash --test 41-start-kills --test 42-plug-kills --test 47-network-restart --test 65-free-pages --test 65-memory \
	    --set SLIPWAY_KILLS=40 --set SLIPWAY_SOAK=1 $(TARGET)/release/slipway || [ $$? = 77 ]
	SLIPWAY_LAB_LIMIT=14400 lab/kvm-host --hardware --test 69-hardware --test 69-hardware-memory --test 69-hardware-bench --test 75-pod-hardware --test 78-pod-memory \
	    --set SLIPWAY_HARDWARE_CYCLES=100 $(TARGET)/release/slipway || [ $$? = 77 ]
	SLIPWAY_LAB_LIMIT=14400 lab/kvm-host --igb --test 69-hardware-nic $(TARGET)/release/slipway || [ $$? = 77 ]
	fuzz/run --each 1800

bench: build ## start-up of sandboxes, stage by stage; disks under load
	@deploy/setup/setup.sh run demo
	@deploy/demo.sh --bench $(TARGET)/release/slipway
	$(TARGET)/release/slipway bench block --native --quick

install: build ## install to PREFIX (/usr/local), with completions, man pages and units of systemd
	install -D -s -m 755 $(PROGRAMS)/slipway $(PROGRAMS)/slipway-bench \
	    $(PROGRAMS)/containerd-shim-slipway-v2 $(PROGRAMS)/slipway-snapshotter \
	    -t $(DESTDIR)$(PREFIX)/bin
	install -d $(addprefix $(DESTDIR)$(PREFIX)/share/,bash-completion/completions \
	    zsh/site-functions fish/vendor_completions.d)
	cd $(DESTDIR)$(PREFIX)/share && \
	    $(abspath $(PROGRAMS))/slipway completions bash >bash-completion/completions/slipway && \
	    $(abspath $(PROGRAMS))/slipway completions zsh >zsh/site-functions/_slipway && \
	    $(abspath $(PROGRAMS))/slipway completions fish >fish/vendor_completions.d/slipway.fish
	$(PROGRAMS)/slipway man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	for unit in deploy/*.service; do sed 's#/usr/bin/#$(PREFIX)/bin/#' $$unit \
	    >$(DESTDIR)$(PREFIX)/lib/systemd/system/$${unit##*/}; done
	install -D -m 644 host/port/include/slipway_port.h $(DESTDIR)$(PREFIX)/include/slipway_port.h
	for library in $(PROGRAMS)/libslipway*.so; do \
	    install -D -m 644 $$library -t $(DESTDIR)$(PREFIX)/lib/slipway; done
	install -D -m 755 $(TARGET)/$(HOST)/agent/slipway-agent \
	    $(DESTDIR)/usr/libexec/slipway/slipway-agent
	install -D -m 755 $(TARGET)/$(HOST)/agent/slipway-load \
	    $(DESTDIR)/usr/libexec/slipway/slipway-load
	install -D -m 755 $(TARGET)/$(HOST)/agent/slipway-guest-sockets \
	    $(DESTDIR)/usr/libexec/slipway/slipway-guest-sockets
	install -D -m 755 $(TARGET)/$(HOST)/agent/slipway-vmm \
	    $(DESTDIR)/usr/libexec/slipway/slipway-vmm
	install -D -m 755 $(TARGET)/$(HOST)/agent/slipway-fs \
	    $(DESTDIR)/usr/libexec/slipway/slipway-fs
	install -D -m 755 $(TARGET)/$(HOST)/agent/slipway-hollow \
	    $(DESTDIR)/usr/libexec/slipway/slipway-hollow
	install -D -m 755 $(TARGET)/$(HOST)/agent/slipway-cni $(DESTDIR)$(CNI_BIN)/slipway-cni

# The archive, and options of deploy/kubernetes/node/image.py such as --name and --qemu.
OUT ?= $(TARGET)/slipway-node.tar
NODE_IMAGE ?=
node-image: build ## an image (OUT) that installs Slipway on the nodes of a Kubernetes cluster, with the guest kernel and mkfs.erofs; options in NODE_IMAGE
	@deploy/setup/setup.sh run image
	rm -rf $(TARGET)/node-image
	@$(MAKE) --no-print-directory --old-file build install DESTDIR=$(abspath $(TARGET))/node-image
	/usr/bin/python3 deploy/kubernetes/node/image.py $(NODE_IMAGE) $(TARGET)/node-image $(OUT)

clean: ## remove what was built; tools and images stay in /var/lib/slipway
	cargo clean
