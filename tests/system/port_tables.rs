//! The tables of the port that programs and scripts read before they use a device, by libibverbs
//! and in sysfs, with both identities.

use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::{compiled, or_skip};

const IDENTITIES: [&str; 2] = ["iwarp", "roce"];

fn with(identity: &str, name: impl AsRef<std::ffi::OsStr>) -> Program {
    Program::new(name).env("URNIC_IDENTITY", identity)
}

#[test]
fn every_query_of_the_port_agrees() {
    let program = or_skip!(compiled("queries"));
    for identity in IDENTITIES {
        let text = with(identity, &program).run().success();
        let types: Vec<&str> = text.lines().filter_map(|line| line.split(' ').nth(1)).collect();
        assert!(!types.is_empty());
        // IBV_GID_TYPE_ROCE_V1 is 1, and stands for IB/RoCE v1; IBV_GID_TYPE_ROCE_V2 is 2.
        for (index, shown) in types.iter().enumerate() {
            let expected = if identity == "roce" && index % 2 == 1 {
                "2"
            } else {
                "1"
            };
            assert_eq!(*shown, expected, "{identity}: {text}");
        }
    }
}

#[test]
fn scripts_find_each_gid_with_type_and_netdev() {
    // As show_gids does: for each device and port, the GIDs that are not zero.
    let script = "for d in /sys/class/infiniband/*; do for p in $d/ports/*; do for g in $p/gids/*; do i=${g##*/}; \
                  echo ${d##*/} ${p##*/} $i $(cat $g) $(cat $p/gid_attrs/types/$i | cut -d' ' -f2) \
                  $(cat $p/gid_attrs/ndevs/$i); done; done; done; ls $d/device/net";
    for identity in IDENTITIES {
        let text = with(identity, "sh").args(["-c", script]).run().success();
        let lines: Vec<&str> = text.lines().collect();
        let (netdev, gids) = lines.split_last().expect("lines");
        assert!(!gids.is_empty(), "{text}");
        for gid in gids {
            let words: Vec<&str> = gid.split(' ').collect();
            assert_eq!(words.len(), 6, "{gid}");
            assert_eq!(words[..2], ["urnic0", "1"]);
            assert_eq!(words[3].len(), 39, "{gid}");
            assert!(["v1", "v2"].contains(&words[4]), "{gid}");
        }
        assert!(gids.iter().any(|gid| gid.ends_with(netdev)), "{text}");
    }
}

#[test]
fn ibstatus_shows_an_active_port() {
    let ibstatus = or_skip!(installed("ibstatus"));
    for identity in IDENTITIES {
        let text = with(identity, &ibstatus).run().success();
        for line in [
            "'urnic0' port 1 status",
            "4: ACTIVE",
            "5: LinkUp",
            "100 Gb/sec (4X EDR)",
            "Ethernet",
        ] {
            assert!(text.contains(line), "{line} is not in {text}");
        }
    }
}

#[test]
fn ibstat_shows_an_adapter_and_no_rnic() {
    let ibstat = or_skip!(installed("ibstat"));
    let text = with("roce", &ibstat).run().success();
    for line in [
        "CA 'urnic0'",
        "State: Active",
        "Physical state: LinkUp",
        "Base lid: 0",
        "Link layer: Ethernet",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    // libibumad passes over RNICs.
    let text = with("iwarp", &ibstat).run().output;
    assert!(!text.contains("urnic0"), "{text}");
}
