# `make help` lists the targets. As root, each target installs missing packages by apt
# (scripts/setup); as another user, it prints their names and stops. CARGO_TARGET_DIR and
# URNIC_CACHE select the folders of builds and of files that are made once.

SHELL   := /bin/bash
CARGO   ?= cargo
PREFIX  ?= /usr/local
DESTDIR ?=

TARGET  := $(or $(CARGO_TARGET_DIR),target)
# Where `install` takes the programs from: release, or dist (scripts/package).
PROFILE ?= release
BUILT   := $(TARGET)/$(PROFILE)
# The program that writes manual pages and completions: it must run on this machine.
URNIC   ?= $(BUILT)/urnic
LIBDIR  := $(DESTDIR)$(PREFIX)/lib/urnic
# Of bash, zsh and fish.
COMPLETIONS := $(DESTDIR)$(PREFIX)/share/bash-completion/completions/urnic \
	$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_urnic $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/urnic.fish
DOCDIR  := $(DESTDIR)$(PREFIX)/share/doc/urnic
# Suppressions for valgrind and ThreadSanitizer: docs/guide/sanitizers.md.
SUPPDIR := $(DESTDIR)$(PREFIX)/share/urnic
PLUGIN  := -p urnic-provider -p urnic-cli
# The other workspace, which builds in the same folder.
RPCRDMA := --manifest-path rpc-rdma/Cargo.toml --target-dir $(TARGET)
# The fuzz targets, as clippy reads them: scripts/fuzz-smoke builds them with the fuzzer's flags.
FUZZ    := --manifest-path fuzz/Cargo.toml --target-dir $(TARGET)/fuzz

# The private provider ABIs of rdma-core: libibverbs finds a plug-in by one of these names.
PROVIDER_ABIS := 34 57 59 64 65

# One line names the step, and without a terminal one more says every ten seconds that it goes on.
DO := scripts/patiently
BUILDING := 'building urnic and liburnic.so, optimised (a minute or two the first time)'

.DEFAULT_GOAL := help
.PHONY: help dev build demo docs nfs test test-all interop cross toolchains bench lint loom soak asan fuzz-smoke package release install uninstall

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

dev: ## check changed crates in seconds: rustfmt, clippy, unit tests, links of pages, one pingpong
	@scripts/setup build demo
	@scripts/dev

build: ## build urnic and liburnic.so, optimised, in target/release
	@scripts/setup build
	@$(DO) $(BUILDING) $(CARGO) build --release $(PLUGIN)
	@echo 'urnic: built $(TARGET)/release/urnic and $(TARGET)/release/liburnic.so' >&2

nfs: ## build urnic-nfs: NFS over RDMA and TCP (also needs cmake and libclang)
	@scripts/setup build nfs
	@$(DO) 'building urnic-nfs, optimised (some minutes the first time)' $(CARGO) build --release $(RPCRDMA) -p urnic-nfs
	@echo 'urnic: built $(TARGET)/release/urnic-nfs' >&2

demo: ## run the distribution's own ibv_devices, ibv_devinfo and ibv_rc_pingpong over urnic
	@scripts/setup build demo
	@$(DO) $(BUILDING) $(CARGO) build --release $(PLUGIN)
	@echo 'urnic: running ibv_devices, ibv_devinfo and ibv_rc_pingpong (seconds)' >&2
	@scripts/demo $(TARGET)/release/urnic

docs: ## build the guide, reference and design pages as a book, target/book/index.html
	@scripts/setup build
	@scripts/book

test: ## run the tests that need only packages (10 minutes on two cores, with the build)
	@scripts/setup build test
	@scripts/test

test-all: ## run every test: also guests, the other Debian release, other projects' tests; DENY_SKIPS=1 fails on an unexpected skip
	@scripts/setup build test test-all
	@scripts/test all

interop: ## test with Linux: soft-iWARP, NFS, VFIO; check captures with tshark (builds a kernel first), packages in empty Debian roots
	@scripts/setup build test test-all interop package cross
	@scripts/test interop

lint: ## run rustfmt, clippy, shellcheck; check that dependencies are used and their licences allowed
	@scripts/setup build lint
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path rpc-rdma/Cargo.toml --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy $(RPCRDMA) --workspace --all-targets -- -D warnings
	RUSTFLAGS='--cfg fuzzing' $(CARGO) clippy $(FUZZ) --locked -- -D warnings
	shellcheck .ci/* $$(grep -lE '^#!.*(ba)?sh' scripts/*)
	@scripts/dependencies

loom: ## try every interleaving of the threads that share a ring, a record or a queue pair
	@scripts/setup build
	@scripts/loom

cross: ## build for arm64 and musl; run programs over both, and unit tests (adds targets by rustup)
	@scripts/setup build cross
	rustup target add aarch64-unknown-linux-gnu
	@scripts/arm64
	@scripts/musl

toolchains: ## run `make demo` with the oldest Rust supported, the default one and the newest stable one (installs them by rustup)
	@scripts/toolchains

bench: ## compare speed and cost with raw TCP, UCX and NFS over TCP, as ratios from one run (PART=hosts: only between hosts)
	@scripts/setup build bench nfs
	@$(DO) 'building urnic and urnic-bench, optimised (some minutes the first time)' \
		$(CARGO) build --release $(PLUGIN) -p urnic-bench
	@$(DO) 'building urnic-nfs, optimised (some minutes the first time)' $(CARGO) build --release $(RPCRDMA) -p urnic-nfs
	@echo 'urnic: measuring (some minutes)' >&2
	@$(TARGET)/release/urnic-bench $(PART)

soak: ## run the long tests: millions of messages, hundreds of runs, valgrind, asan (an hour or more)
	@scripts/setup build test test-all
	@scripts/test soak

asan: ## run the crates' own tests under AddressSanitizer, on the stable toolchain
	@scripts/setup build asan
	@scripts/asan

fuzz-smoke: ## run every fuzz target for a minute (FUZZ_SECONDS=60), on the stable toolchain
	@scripts/setup build fuzz
	@scripts/fuzz-smoke

package: ## make a tarball, .debs, .rpm and a Python wheel for glibc 2.28 and later, in target/package
	@scripts/setup build nfs package
	@scripts/package

release: ## check everything that a release needs, and make its packages; tags nothing
	@scripts/release

install: ## install urnic, liburnic.so, urnic-nfs if built, and the documentation (DESTDIR, PREFIX)
	@test -e $(BUILT)/liburnic.so || { echo "install: liburnic.so is not built: run 'make build' first" >&2; exit 1; }
	install -D -m 755 $(BUILT)/urnic $(DESTDIR)$(PREFIX)/bin/urnic
	install -D -m 755 $(BUILT)/liburnic.so $(LIBDIR)/liburnic.so
	for abi in $(PROVIDER_ABIS); do ln -sf liburnic.so $(LIBDIR)/liburnic-rdmav$$abi.so || exit 1; done
	install -D -m 644 docs/urnic.1 $(DESTDIR)$(PREFIX)/share/man/man1/urnic.1
	$(URNIC) man --into $(DESTDIR)$(PREFIX)/share/man/man1
	test ! -e $(BUILT)/urnic-nfs || install -D -m 755 $(BUILT)/urnic-nfs $(DESTDIR)$(PREFIX)/bin/urnic-nfs
	test ! -e $(BUILT)/urnic-nfs || install -D -m 644 docs/urnic-nfs.1 $(DESTDIR)$(PREFIX)/share/man/man1/urnic-nfs.1
	install -d $(dir $(COMPLETIONS))
	$(URNIC) completions bash >$(word 1,$(COMPLETIONS))
	$(URNIC) completions zsh >$(word 2,$(COMPLETIONS))
	$(URNIC) completions fish >$(word 3,$(COMPLETIONS))
	install -D -m 644 -t $(SUPPDIR) share/valgrind.supp share/tsan.supp
	install -D -m 644 -t $(SUPPDIR)/faults share/faults/*.faults
	install -D -m 644 -t $(DOCDIR) README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE-MIT LICENSE-APACHE
	for page in $$(find docs -name "*.md" -o -name "*.svg"); do install -D -m 644 $$page $(DOCDIR)/$$page || exit 1; done

uninstall: ## remove the installed files
	rm -f $(DESTDIR)$(PREFIX)/bin/urnic $(DESTDIR)$(PREFIX)/share/man/man1/urnic.1
	rm -f $(DESTDIR)$(PREFIX)/share/man/man1/urnic-*.1 $(DESTDIR)$(PREFIX)/bin/urnic-nfs
	rm -f $(COMPLETIONS)
	rm -rf $(LIBDIR) $(DOCDIR) $(SUPPDIR)
