# The front door: `make help` lists the targets. Each target installs what it lacks (scripts/setup, by apt as
# root) or names the packages and stops. CARGO_TARGET_DIR and URNIC_CACHE are honoured.

SHELL   := /bin/bash
CARGO   ?= cargo
PREFIX  ?= /usr/local
DESTDIR ?=

TARGET  := $(or $(CARGO_TARGET_DIR),target)
LIBDIR  := $(DESTDIR)$(PREFIX)/lib/urnic
DOCDIR  := $(DESTDIR)$(PREFIX)/share/doc/urnic
# Suppressions for valgrind and ThreadSanitizer: docs/guide/sanitizers.md.
SUPPDIR := $(DESTDIR)$(PREFIX)/share/urnic
PLUGIN  := -p urnic-provider -p urnic-cli

# The private provider ABIs of rdma-core; libibverbs looks a plug-in up by one of these names.
PROVIDER_ABIS := 34 57 59 64 65

# What a build does is said: by cargo itself on a terminal, by one line elsewhere.
QUIET := $(shell test -t 2 || echo --quiet)
SAY   := printf 'urnic: %s\n'

.DEFAULT_GOAL := help
.PHONY: help dev build demo docs nfs test interop cross bench lint loom soak asan fuzz-smoke install uninstall

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

dev: ## the quick loop, in seconds: rustfmt, clippy and unit tests of changed crates, links of changed pages, one pingpong
	@scripts/setup build demo
	@scripts/dev

build: ## urnic and liburnic.so, optimised, in target/release
	@scripts/setup build
	@$(SAY) 'building urnic and liburnic.so, optimised (some minutes the first time)' >&2
	@$(CARGO) build --release $(QUIET) $(PLUGIN)
	@$(SAY) 'built $(TARGET)/release/urnic and $(TARGET)/release/liburnic.so' >&2

nfs: ## urnic-nfs: NFS over RDMA and TCP (takes cmake and libclang besides)
	@scripts/setup build nfs
	@$(SAY) 'building urnic-nfs, optimised (some minutes the first time)' >&2
	@$(CARGO) build --release $(QUIET) -p urnic-nfs
	@$(SAY) 'built $(TARGET)/release/urnic-nfs' >&2

demo: ## the distribution's own ibv_devices, ibv_devinfo and ibv_rc_pingpong over urnic
	@scripts/setup build demo
	@$(SAY) 'building urnic and liburnic.so, optimised (some minutes the first time)' >&2
	@$(CARGO) build --release $(QUIET) $(PLUGIN)
	@$(SAY) 'running ibv_devices, ibv_devinfo and ibv_rc_pingpong (seconds)' >&2
	@scripts/demo $(TARGET)/release/urnic

docs: ## the guide, reference and design pages as a book, target/book/index.html
	@scripts/setup build
	@scripts/book

test: ## every test: units, then real programs (under 20 minutes on two cores); DENY_SKIPS=1 fails on an unexpected skip
	@scripts/setup build test
	@scripts/test

interop: ## soft-iWARP by mode and speed beside it; tshark's verdict; NFS with Linux; VFIO by iommufd and without an IOMMU (builds a kernel first)
	@scripts/setup build test interop
	@scripts/test interop

lint: ## rustfmt, clippy, shellcheck; dependencies that are unused, or whose licence or source is not allowed
	@scripts/setup build lint
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	shellcheck .ci/run $$(grep -lE '^#!.*(ba)?sh' scripts/*)
	@scripts/dependencies

loom: ## every interleaving of the threads that share a ring, a record or a queue pair
	@scripts/setup build
	@scripts/loom

cross: ## for arm64: does it compile, and do the tests of rings, memory and its accesses pass in an emulated one? (adds that target by rustup)
	@scripts/setup build cross
	rustup target add aarch64-unknown-linux-gnu
	$(CARGO) check --target aarch64-unknown-linux-gnu $(PLUGIN)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64-static -L /usr/aarch64-linux-gnu' \
	$(CARGO) test --target aarch64-unknown-linux-gnu --lib -p urnic-model -- fault:: memory:: queues:: llp::

bench: ## speed and cost against raw TCP, UCX and NFS over TCP, as ratios from one run
	@scripts/setup build bench nfs
	@$(SAY) 'building urnic, urnic-nfs and urnic-bench, optimised (some minutes the first time)' >&2
	@$(CARGO) build --release $(QUIET) $(PLUGIN) -p urnic-nfs -p urnic-bench
	@$(SAY) 'measuring (some minutes)' >&2
	@$(TARGET)/release/urnic-bench

soak: ## the long forms of the tests: millions of messages, hundreds of runs, valgrind, asan (an hour or more)
	@scripts/setup build test
	@scripts/test soak

asan: ## the crates' own tests under AddressSanitizer, on the stable toolchain
	@scripts/setup build asan
	@scripts/asan

fuzz-smoke: ## every fuzz target for a minute (FUZZ_SECONDS=60), on the stable toolchain
	@scripts/setup build fuzz
	@scripts/fuzz-smoke

install: ## urnic, liburnic.so, urnic-nfs if built, their man pages, the documentation and the licences under DESTDIR PREFIX (/usr/local)
	@test -e $(TARGET)/release/liburnic.so || { echo "install: nothing is built yet: run 'make build' first" >&2; exit 1; }
	install -D -m 755 $(TARGET)/release/urnic $(DESTDIR)$(PREFIX)/bin/urnic
	install -D -m 755 $(TARGET)/release/liburnic.so $(LIBDIR)/liburnic.so
	for abi in $(PROVIDER_ABIS); do ln -sf liburnic.so $(LIBDIR)/liburnic-rdmav$$abi.so || exit 1; done
	install -D -m 644 docs/urnic.1 $(DESTDIR)$(PREFIX)/share/man/man1/urnic.1
	test ! -e $(TARGET)/release/urnic-nfs || install -D -m 755 $(TARGET)/release/urnic-nfs $(DESTDIR)$(PREFIX)/bin/urnic-nfs
	test ! -e $(TARGET)/release/urnic-nfs || install -D -m 644 docs/urnic-nfs.1 $(DESTDIR)$(PREFIX)/share/man/man1/urnic-nfs.1
	install -D -m 644 -t $(SUPPDIR) share/valgrind.supp share/tsan.supp
	install -D -m 644 -t $(DOCDIR) README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE
	for page in $$(find docs -name '*.md'); do install -D -m 644 $$page $(DOCDIR)/$$page || exit 1; done

uninstall: ## what install put there
	rm -f $(DESTDIR)$(PREFIX)/bin/urnic $(DESTDIR)$(PREFIX)/share/man/man1/urnic.1
	rm -f $(DESTDIR)$(PREFIX)/bin/urnic-nfs $(DESTDIR)$(PREFIX)/share/man/man1/urnic-nfs.1
	rm -rf $(LIBDIR) $(DOCDIR) $(SUPPDIR)
