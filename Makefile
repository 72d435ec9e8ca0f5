# The front door: `make help` lists the targets. Each target installs what it lacks (scripts/setup, by apt as
# root) or names the packages and stops. CARGO_TARGET_DIR and URNIC_CACHE are honoured.

SHELL   := /bin/bash
CARGO   ?= cargo
PREFIX  ?= /usr/local
DESTDIR ?=

TARGET  := $(or $(CARGO_TARGET_DIR),target)
LIBDIR  := $(DESTDIR)$(PREFIX)/lib/urnic
DOCDIR  := $(DESTDIR)$(PREFIX)/share/doc/urnic
PLUGIN  := -p urnic-provider -p urnic-cli

# The private provider ABIs of rdma-core; libibverbs looks a plug-in up by one of these names.
PROVIDER_ABIS := 34 57 59 64 65

.DEFAULT_GOAL := help
.PHONY: help build demo nfs test interop cross bench lint soak asan fuzz-smoke install uninstall

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## urnic and liburnic.so, optimised, in target/release
	@scripts/setup build
	$(CARGO) build --release $(PLUGIN)

nfs: ## urnic-nfs: NFS over RDMA and TCP (takes cmake and libclang besides)
	@scripts/setup build nfs
	$(CARGO) build --release -p urnic-nfs

demo: ## the distribution's own ibv_devices, ibv_devinfo and ibv_rc_pingpong over urnic
	@scripts/setup build demo
	$(CARGO) build --release --quiet $(PLUGIN)
	@scripts/demo $(TARGET)/release/urnic

test: ## every test: units, then real programs (under 20 minutes on two cores)
	@scripts/setup build test
	@scripts/test

interop: ## soft-iWARP by mode and speed beside it; tshark's verdict; NFS with Linux; VFIO by iommufd and without an IOMMU (builds a kernel first)
	@scripts/setup build test interop
	@scripts/test interop

lint: ## rustfmt, clippy, shellcheck
	@scripts/setup build lint
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	shellcheck .ci/run $$(grep -lE '^#!.*(ba)?sh' scripts/*)

cross: ## does it compile for arm64? (adds that target to the toolchain, by rustup)
	@scripts/setup build
	rustup target add aarch64-unknown-linux-gnu
	$(CARGO) check --target aarch64-unknown-linux-gnu $(PLUGIN)

bench: ## speed and cost against raw TCP, UCX and NFS over TCP, as ratios from one run
	@scripts/setup build bench nfs
	$(CARGO) build --release --quiet $(PLUGIN) -p urnic-nfs -p urnic-bench
	@$(TARGET)/release/urnic-bench

soak: ## the long forms of the tests: millions of messages, hundreds of runs, valgrind, asan (an hour or more)
	@scripts/setup build test
	@scripts/test soak

asan: ## the crates' own tests under AddressSanitizer, on the stable toolchain
	@scripts/setup build nfs
	@scripts/asan

fuzz-smoke: ## every fuzz target for a minute (FUZZ_SECONDS=60), on the stable toolchain
	@scripts/setup build fuzz
	@scripts/fuzz-smoke

install: ## urnic, liburnic.so, urnic-nfs if built, their man pages and the licences under DESTDIR PREFIX (/usr/local)
	@test -e $(TARGET)/release/liburnic.so || { echo "install: nothing is built yet: run 'make build' first" >&2; exit 1; }
	install -D -m 755 $(TARGET)/release/urnic $(DESTDIR)$(PREFIX)/bin/urnic
	install -D -m 755 $(TARGET)/release/liburnic.so $(LIBDIR)/liburnic.so
	for abi in $(PROVIDER_ABIS); do ln -sf liburnic.so $(LIBDIR)/liburnic-rdmav$$abi.so || exit 1; done
	install -D -m 644 docs/urnic.1 $(DESTDIR)$(PREFIX)/share/man/man1/urnic.1
	test ! -e $(TARGET)/release/urnic-nfs || install -D -m 755 $(TARGET)/release/urnic-nfs $(DESTDIR)$(PREFIX)/bin/urnic-nfs
	test ! -e $(TARGET)/release/urnic-nfs || install -D -m 644 docs/urnic-nfs.1 $(DESTDIR)$(PREFIX)/share/man/man1/urnic-nfs.1
	install -D -m 644 -t $(DOCDIR) README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE

uninstall: ## what install put there
	rm -f $(DESTDIR)$(PREFIX)/bin/urnic $(DESTDIR)$(PREFIX)/share/man/man1/urnic.1
	rm -f $(DESTDIR)$(PREFIX)/bin/urnic-nfs $(DESTDIR)$(PREFIX)/share/man/man1/urnic-nfs.1
	rm -rf $(LIBDIR) $(DOCDIR)
