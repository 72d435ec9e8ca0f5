//! Peers on the same host, compared with UCX over shared memory and with the kernel's own copies
//! between processes.

use crate::place::Place;
use crate::table::{Aim, Measured, Row, tried};
use crate::{ours, ucx};

/// Sizes of bandwidths, how the table calls them, and messages of a run: so many that the few
/// milliseconds count little by which perftest's requests begin late, because its server never
/// changes to RTS.
const SIZES: [(usize, &str, u64); 2] = [(65_536, "64 KiB", 100_000), (1_048_576, "1 MiB", 10_000)];
const BANDWIDTHS: [&str; 3] = ["ib_write_bw", "ib_read_bw", "ib_send_bw"];

/// Many connections; each takes a descriptor of the 20,000 that a process may have.
const MANY: [(u32, &str); 2] = [(1_000, "1,000"), (9_500, "9,500")];

/// The rows, in the order of [`measure`].
pub(crate) fn rows() -> Vec<Row> {
    let mut rows = vec![
        Row::new(
            "host: ib_send_lat 8 B",
            "us",
            "UCX tag_lat, shm",
            Aim::AtMost(1.0),
        ),
        Row::new(
            "host: ib_write_lat 8 B",
            "us",
            "process_vm_writev itself",
            Aim::AtMost(1.2),
        ),
        Row::new(
            "host: ib_read_lat 8 B",
            "us",
            "process_vm_readv itself",
            Aim::AtMost(1.3),
        ),
    ];
    for (_, size, _) in SIZES {
        for tool in BANDWIDTHS {
            rows.push(Row::new(
                &format!("host: {tool} {size}"),
                "MiB/s",
                "UCX tag_bw, shm",
                Aim::AtLeast(0.95),
            ));
        }
    }
    rows.push(Row::new(
        "host: ib_send_bw 64 B, messages",
        "M/s",
        "UCX tag_bw, shm",
        Aim::AtLeast(0.5),
    ));
    rows.push(Row::new(
        "host: ibv_rc_pingpong",
        "us",
        "the same over TCP",
        Aim::AtMost(0.15),
    ));
    for (_, many) in MANY {
        for figure in ["median", "p99"] {
            rows.push(Row::new(
                &format!("host: Send among {many}, {figure}"),
                "us",
                "among ten connections",
                Aim::AtMost(1.5),
            ));
        }
        let memory = format!("host: memory of one of {many}");
        rows.push(Row::new(&memory, "KiB", "16 KiB", Aim::AtMost(1.0)));
    }
    rows
}

/// Measures one round.
pub(crate) fn measure(rows: &mut [Row]) {
    let mut rows = rows.iter_mut();
    let mut add = |ours: Measured<f64>, theirs: Measured<f64>| {
        if let Some(row) = rows.next() {
            row.add(ours, Some(theirs));
        }
    };
    let here = &Place::here();
    let median = |name| tried(move || Ok(ours::latency(here, name, "-s 8 -n 100000")?.median));
    add(
        median("ib_send_lat"),
        tried(|| ucx::latency(here, &ucx::over_memory(), 8)),
    );
    add(median("ib_write_lat"), tried(|| ours::kernel_copy("write")));
    add(median("ib_read_lat"), tried(|| ours::kernel_copy("read")));
    for (size, _, count) in SIZES {
        for tool in BANDWIDTHS {
            let theirs = tried(|| ucx::bandwidth(here, &ucx::over_memory(), size, count));
            add(
                tried(|| ours::bandwidth(here, tool, &format!("-s {size} -n {count}"))),
                theirs,
            );
        }
    }
    let theirs = tried(|| ucx::messages(here, &ucx::over_memory(), 64, 8_000_000));
    add(
        tried(|| ours::rate(here, "ib_send_bw", "-s 64 -n 8000000")),
        theirs,
    );
    let pingpong = |same_host| tried(move || ours::pingpong(same_host));
    add(pingpong("auto"), pingpong("off"));
    let ten = tried(|| ours::among(10));
    for (number, _) in MANY {
        let many = tried(|| ours::among(number));
        let figures: [fn(&ours::Among) -> f64; 2] = [|among| among.median, |among| among.p99];
        for figure in figures {
            let of = |among: &Measured<ours::Among>| among.as_ref().map(figure).map_err(Clone::clone);
            add(of(&many), of(&ten));
        }
        add(many.map(|many| many.kibibytes), Ok(16.0));
    }
}
