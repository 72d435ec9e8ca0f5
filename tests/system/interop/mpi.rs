//! Open MPI, MPICH and mpi4py of Debian, by UCX and by libfabric, without shared memory: eight
//! ranks on this machine.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use urnic_tests::build::{scratch, tree};
use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;

const LIMIT: Duration = Duration::from_secs(300);

/// Options of Open MPI that leave neither its own TCP nor shared memory; more ranks than cores.
const OPEN_MPI: &str = "--oversubscribe --allow-run-as-root --mca btl ^vader,tcp,openib,ofi";

/// `tests/programs/mpi.c`, compiled by this compiler of an MPI.
fn compiled_by(compiler: &str) -> Result<PathBuf, String> {
    installed(compiler)?;
    let program = scratch().join(format!("mpi-{compiler}"));
    let source = tree().join("tests/programs/mpi.c");
    // MPICH's MPI_STATUSES_IGNORE is an array of length 0 to gcc.
    let options = [
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-stringop-overflow",
        "-o",
    ];
    let output = Command::new(compiler)
        .args(options)
        .args([&program, &source])
        .output();
    let output = output.map_err(|error| format!("{compiler}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler}: {said}");
    Ok(program)
}

/// `mpirun` that sees a RoCE NIC, with UCX's transports.
fn mpirun(name: &str, transports: &str) -> Program {
    Program::new(name)
        .env("URNIC_IDENTITY", "roce")
        .env("UCX_TLS", transports)
        .env("UCX_LOG_LEVEL", "info")
}

#[test]
#[ignore = "make interop"]
fn open_mpi_by_ucx() {
    let program = or_skip!(compiled_by("mpicc.openmpi"));
    for (transports, way, arguments) in [
        ("rc,ud,self", "rc_verbs/urnic0:1", ""),
        ("ud_verbs,self", "ud_verbs/urnic0:1", "two-sided"),
    ] {
        let said = mpirun("mpirun.openmpi", transports)
            .line(&format!("-n 8 {OPEN_MPI} --mca pml ucx --mca osc ucx"))
            .arg(&program)
            .line(arguments)
            .run_for(LIMIT)
            .success();
        assert!(said.contains("8 ranks: all data is right"), "{said}");
        assert!(said.contains(way), "{said}");
    }
}

/// libfabric's verbs provider takes no address of the loopback interface.
#[test]
#[ignore = "make interop"]
fn open_mpi_by_libfabric() {
    let program = or_skip!(compiled_by("mpicc.openmpi"));
    let [host, _peer] = or_skip!(Netns::pair());
    for identity in ["roce", "iwarp"] {
        let mpi = Program::new("mpirun.openmpi")
            .env("URNIC_IDENTITY", identity)
            .env("URNIC_LOG", "warn,urnic_cm::rdma_cm::active=debug")
            .line(&format!("-n 8 {OPEN_MPI} --mca pml cm --mca mtl ofi"))
            .args(["--mca", "mtl_ofi_provider_include", "verbs;ofi_rxm"])
            .arg(&program)
            .arg("two-sided");
        let said = host.program(mpi).run_for(LIMIT).success();
        assert!(said.contains("8 ranks: all data is right"), "{said}");
        assert!(said.contains("connects over stream"), "{said}");
    }
}

#[test]
#[ignore = "make interop"]
fn mpich_by_ucx() {
    let program = or_skip!(compiled_by("mpicc.mpich"));
    let said = mpirun("mpirun.mpich", "rc,ud,self")
        .args(["-n", "8"])
        .arg(&program)
        .run_for(LIMIT)
        .success();
    assert!(said.contains("8 ranks: all data is right"), "{said}");
    assert!(said.contains("rc_verbs/urnic0:1"), "{said}");
}

const PYTHON: &str = r#"
import array
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
objects = world.allgather({"rank": rank, "text": "x" * (rank * 1000)})
assert [one["rank"] for one in objects] == list(range(size))
assert all(len(one["text"]) == at * 1000 for at, one in enumerate(objects))
before = (rank - 1) % size
for length in (1, 1000, 100000):
    out = array.array("i", (rank * 7 + at for at in range(length)))
    got = array.array("i", [0]) * length
    world.Sendrecv(out, (rank + 1) % size, recvbuf=got, source=before)
    assert all(value == before * 7 + at for at, value in enumerate(got))
assert world.allreduce(rank) == size * (size - 1) // 2
if rank == 0:
    print(size, "ranks: right")
"#;

#[test]
#[ignore = "make interop"]
fn mpi4py_by_ucx() {
    or_skip!(installed("mpirun.openmpi"));
    if !Program::plain("/usr/bin/python3")
        .args(["-c", "import mpi4py"])
        .run()
        .ok()
    {
        return urnic_tests::skip::report("python3-mpi4py is not installed");
    }
    let said = mpirun("mpirun.openmpi", "rc,ud,self")
        .line(&format!("-n 4 {OPEN_MPI} --mca pml ucx /usr/bin/python3 -c"))
        .arg(PYTHON)
        .run_for(LIMIT)
        .success();
    assert!(said.contains("4 ranks: right"), "{said}");
    assert!(said.contains("rc_verbs/urnic0:1"), "{said}");
}
