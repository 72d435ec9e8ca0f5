use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use urnic_wire::mpa::startup::RtrKey;

use super::read::NOT_OPTIONS;
use super::*;

fn vars<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Iterator<Item = (OsString, OsString)> + 'a {
    pairs
        .iter()
        .map(|(name, value)| (OsString::from(name), OsString::from(value)))
}

fn load(pairs: &[(&str, &str)]) -> Result<Config, Error> {
    Config::from_vars(vars(pairs))
}

fn complaint(pairs: &[(&str, &str)]) -> String {
    load(pairs).expect_err("refused").to_string()
}

struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("urnic-config-{}-{name}.toml", std::process::id()));
        std::fs::write(&path, text).expect("a file in the temporary folder");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn without_urnic_variables_the_defaults_apply() {
    assert_eq!(load(&[("PATH", "/bin"), ("URNICX", "1")]), Ok(Config::default()));
}

#[test]
fn mpa_c_01_crc_is_on_unless_an_administrator_turns_it_off() {
    assert!(load(&[]).expect("defaults").mpa.crc);
    assert!(!load(&[("URNIC_MPA_CRC", "false")]).expect("set").mpa.crc);
}

#[test]
fn mpa_c_07_crc_off_is_worth_a_warning() {
    assert_eq!(Config::default().warnings().count(), 0);
    let config = load(&[("URNIC_MPA_CRC", "off")]).expect("set");
    assert!(config.warnings().all(|line| line.contains("mpa.crc")));
    assert_eq!(config.warnings().count(), 1);
}

#[test]
fn every_default_can_be_written_back() {
    for opt in OPTIONS {
        let mut config = Config::default();
        let shown = opt.value(&config);
        opt.set_text(&mut config, &shown, Source::Flag("--set"))
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config, Config::default(), "{}", opt.key);
    }
}

#[test]
fn every_option_reaches_the_configuration_and_is_shown() {
    let other = |key: &str| match key {
        "device" => "vfio:0000:3b:00.1",
        "log" => "urnic=trace",
        "pcap" | "present.dir" | "report" | "suppressions" | "trace" => "/x/y",
        "strict" => "error",
        "faults" => "drop",
        "mpa.crc" | "mpa.peer_to_peer" => "false",
        "mpa.markers" | "mpa.strict_rtr" | "mpa.strict_depths" | "native.allow_nat" => "true",
        "mpa.revision" => "1",
        "mpa.rtr_types" => "send,read",
        "mpa.rtr_frame" => "text",
        "native.listen" => "fd00::2",
        "vfio.api" => "cdev",
        "cm.ports" => "own",
        "identity" => "roce",
        "real_devices" => "hidden",
        "completion" => "delivered",
        "same_host" => "off",
        "llp" => "sctp",
        "wire" => "roce",
        "sctp.transport" => "kernel-udp",
        "refusals" => "false",
        "placement" => "last-first",
        "native.port_range" => "4000-4100",
        _ => "7",
    };
    for opt in OPTIONS {
        let mut config = Config::default();
        config
            .set(opt.key, other(opt.key), Source::Flag("--set"))
            .unwrap_or_else(|error| panic!("{error}"));
        assert_ne!(config, Config::default(), "{}", opt.key);
        assert_eq!(opt.value(&config), other(opt.key));
    }
}

/// The names, addresses and ways of the devices of a file.
fn devices_of(text: &str) -> Result<Vec<DeviceConfig>, String> {
    let mut config = Config::default();
    config
        .set_file(text, Path::new("f.toml"))
        .and_then(|()| config.check_devices())
        .map(|()| config.each_device())
        .map_err(|error| error.to_string())
}

#[test]
fn each_section_is_a_device() {
    let devices = devices_of(
        "name = \"mlx5_0\"\n[[device]]\naddresses = [\"192.0.2.1\", \"2001:db8::1\"]\n\
         [[device]]\ndevice = \"vfio-user:/s\"\n[[device]]\nname = \"rail\"\n",
    )
    .expect("good");
    let device = |name: &str, addresses: &[&str], device| DeviceConfig {
        name: name.to_owned(),
        addresses: addresses
            .iter()
            .map(|ip| ip.parse().expect("an address"))
            .collect(),
        device,
    };
    let expected = [
        device("mlx5_0", &["192.0.2.1", "2001:db8::1"], Device::Inproc),
        device("mlx5_1", &[], Device::VfioUser("/s".into())),
        device("rail", &[], Device::Inproc),
    ];
    assert_eq!(devices, expected);
}

#[test]
fn a_number_of_devices_makes_as_many_names() {
    let config = load(&[("URNIC_NAME", "mlx5_0"), ("URNIC_DEVICES", "3")]).expect("good");
    let names: Vec<String> = config
        .each_device()
        .into_iter()
        .map(|device| device.name)
        .collect();
    assert_eq!(names, ["mlx5_0", "mlx5_1", "mlx5_2"]);
    assert_eq!(config.of_device(&config.each_device()[2]).each_device().len(), 1);
}

#[test]
fn devices_that_exclude_each_other_are_refused() {
    let two = |first: &str, second: &str| format!("[[device]]\n{first}\n[[device]]\n{second}\n");
    let section = "f.toml, line 3: a [[device]]";
    for (text, says) in [
        (
            two("name = \"a0\"", "name = \"a0\""),
            format!("{section} is named a0 like another: give each its own name"),
        ),
        (
            two("addresses = [\"192.0.2.1\"]", "addresses = [\"192.0.2.1\"]"),
            format!("{section} has the address 192.0.2.1 as another has: give it to one of them"),
        ),
        (
            two("device = \"vfio:0000:00:01.0\"", "device = \"vfio:0000:00:01.0\""),
            format!("{section} is vfio:0000:00:01.0 like another: give each its own function"),
        ),
        (
            two("", "device = \"vfio-user:/s\"\naddresses = [\"192.0.2.1\"]"),
            format!("{section} cannot have addresses: vfio-user:/s has its own; leave them out"),
        ),
        (
            two("", "colour = 1"),
            "f.toml, line 4: a [[device]] cannot have colour: it takes name, addresses and device".to_owned(),
        ),
        (
            two("", "addresses = [\"192.0.2.300\"]"),
            "f.toml, line 4: addresses cannot be 192.0.2.300: it takes a list of different IP addresses of this \
             host, as [\"192.0.2.7\"]"
                .to_owned(),
        ),
        (
            two("", "name = \"a/b\""),
            "f.toml, line 4: name cannot be a/b: it takes 1 to 63 letters, digits, _, - and ., of which the first \
             is no - or ."
                .to_owned(),
        ),
        (
            format!("devices = 3\n{}", two("", "")),
            "devices=3, but the file has 2 [[device]] sections: leave out one of both".to_owned(),
        ),
        (
            "[[device]]\n".repeat(65),
            "f.toml: 65 [[device]] sections: a process has at most 64 devices".to_owned(),
        ),
        (
            format!("devices = 2\nname = \"{}9\"\n", "x".repeat(62)),
            format!(
                "devices=2: a device would be named {}10, which is longer than 63 bytes: give a shorter name",
                "x".repeat(62)
            ),
        ),
    ] {
        assert_eq!(devices_of(&text), Err(says), "{text}");
    }
    for (variable, value) in [
        ("URNIC_DEVICES", "0"),
        ("URNIC_DEVICES", "65"),
        ("URNIC_NAME", "a:1"),
    ] {
        let text = complaint(&[(variable, value)]);
        assert!(text.starts_with(&format!("{variable}: ")), "{text}");
    }
}

#[test]
fn keys_and_variables_are_unique() {
    let mut names: Vec<String> = OPTIONS.iter().map(Opt::variable).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), OPTIONS.len());
    assert!(names.iter().all(|name| !NOT_OPTIONS.contains(&name.as_str())));
}

#[test]
fn later_sources_win() {
    let file = File::new(
        "order",
        "mpa.crc = false\n[native]\nfin_grace_ms = 1\ncall_grace_ms = 1\nmax_parked = 1\n",
    );
    let config = load(&[
        ("URNIC_NATIVE_MAX_PARKED", "3"),
        ("URNIC_SET", "native.call_grace_ms=2,native.max_parked=2"),
        ("URNIC_CONFIG", file.path()),
    ])
    .expect("good");
    assert!(!config.mpa.crc);
    assert_eq!(config.native.fin_grace, Duration::from_millis(1));
    assert_eq!(config.native.call_grace, Duration::from_millis(2));
    assert_eq!(config.native.max_parked, 3);
}

#[test]
fn a_list_continues_over_commas_and_a_file_takes_arrays() {
    let all = RtrTypes {
        send: true,
        write: true,
        read: true,
    };
    let config = load(&[("URNIC_SET", "mpa.rtr_types=send, write,read ,mpa.crc=no")]).expect("good");
    assert_eq!((config.mpa.rtr_types, config.mpa.crc), (all, false));

    let file = File::new("array", "mpa.rtr_types = [\"send\", \"write\", \"read\"]");
    assert_eq!(
        load(&[("URNIC_CONFIG", file.path())])
            .expect("good")
            .mpa
            .rtr_types,
        all
    );
}

#[test]
fn unknown_keys_are_named_with_their_place_and_a_suggestion() {
    assert_eq!(
        complaint(&[("URNIC_MPA_CRCS", "1")]),
        "URNIC_MPA_CRCS: there is no option URNIC_MPA_CRCS; did you mean URNIC_MPA_CRC?"
    );
    assert_eq!(
        complaint(&[("URNIC_SET", "bananas=1")]),
        "URNIC_SET: there is no option bananas; `urnic run --help` lists them"
    );
    let file = File::new("unknown", "[mpa]\nmarker = true");
    assert_eq!(
        complaint(&[("URNIC_CONFIG", file.path())]),
        format!(
            "{}, line 2: there is no option mpa.marker; did you mean mpa.markers?",
            file.path()
        )
    );
}

#[test]
fn bad_values_are_reported_with_valid_ones() {
    assert_eq!(
        complaint(&[("URNIC_MPA_REVISION", "3")]),
        "URNIC_MPA_REVISION: mpa.revision cannot be 3: it takes 1 or 2"
    );
    for (key, value) in [
        ("device", "vfio:3b:00.1"),
        ("device", "vfio:0000.3b:00:1"),
        ("device", "vfio-user:"),
        ("device", "mlx5_0"),
        ("log", ""),
        ("log", "verbose"),
        ("native.allow_nat", "perhaps"),
        ("mpa.crc", "maybe"),
        ("mpa.rtr_types", ""),
        ("mpa.rtr_types", "write,atomic"),
        ("mpa.startup_timeout_initiator_s", "0"),
        ("mpa.startup_timeout_responder_s", "-1"),
        ("native.listen", "localhost"),
        ("native.port_range", "0-5"),
        ("native.port_range", "9-5"),
        ("native.port_range", "1-65536"),
        ("cm.ack_timeout", "32"),
        ("cm.ack_timeout", "-1"),
        ("native.max_parked", "1e3"),
        ("native.max_parked", "99999999999"),
        ("present.dir", "relative"),
    ] {
        let error = Config::default()
            .set(key, value, Source::Flag("--set"))
            .expect_err(value);
        assert!(
            matches!(&error, Error::Value { key: k, .. } if *k == key),
            "{error}"
        );
    }
}

#[test]
fn a_bad_value_of_any_option_is_an_error_wherever_it_is_set() {
    for opt in OPTIONS {
        let bad = match opt.key {
            // Any text is a file name.
            "pcap" | "report" | "suppressions" | "trace" => continue,
            "present.dir" => "relative",
            _ => "no such value",
        };
        let is_value = |error: &Error| matches!(error, Error::Value { key, .. } if *key == opt.key);
        let by_flag = Config::default()
            .set(opt.key, bad, Source::Flag("--set"))
            .expect_err(opt.key);
        let (variable, list) = (opt.variable(), format!("{}={bad}", opt.key));
        let by_variable = load(&[(&variable, bad)]).expect_err(opt.key);
        let by_list = load(&[("URNIC_SET", &list)]).expect_err(opt.key);
        let text = format!("{} = \"{bad}\"\n", opt.key);
        let by_file = Config::default()
            .set_file(&text, Path::new("x"))
            .expect_err(opt.key);
        for error in [by_flag, by_variable, by_list, by_file] {
            assert!(is_value(&error), "{}: {error}", opt.key);
        }
    }
}

#[test]
fn error_lines_have_no_line_breaks() {
    let file = File::new("syntax", "a = 1\nmpa = [\n\n");
    let broken = complaint(&[("URNIC_CONFIG", file.path())]);
    assert!(
        broken.starts_with(&format!("{}: not TOML: line ", file.path())),
        "{broken}"
    );
    for line in [
        broken,
        complaint(&[("URNIC_MPA_CRC", "a\nb")]),
        complaint(&[("URNIC_SET", "a\nb")]),
    ] {
        assert!(!line.contains('\n'), "{line}");
    }
}

#[test]
fn peers_have_their_own_options_and_the_first_fit_wins() {
    let file = File::new(
        "peers",
        "[mpa]\ncrc = false\n\n[[peer]]\naddress = \"192.0.2.7\"\nmpa.rtr_frame = \"hex\"\n\n\
         [[peer]]\naddress = \"192.0.2.0/24\"\nmpa.crc = true\nmpa.rtr_types = [\"send\"]\n[peer.cm]\nrnr_grace_ms = 5\n",
    );
    let config = load(&[("URNIC_CONFIG", file.path()), ("URNIC_MPA_RTR_TYPES", "read")]).expect("good");
    let facing = |address: &str| config.facing(address.parse().expect("an address"));
    assert_eq!(facing("192.0.2.7").mpa.rtr_frame, Some(RtrKey::Hex));
    assert!(!facing("192.0.2.7").mpa.crc);
    let network = facing("192.0.2.8");
    assert!(network.mpa.crc && network.mpa.rtr_types.send && !network.mpa.rtr_types.read);
    assert_eq!(network.cm.rnr_grace, Duration::from_millis(5));
    assert_eq!(facing("192.0.3.1"), config);
}

#[test]
fn listeners_have_the_lower_layers_of_all_peers() {
    let far = "[[peer]]\naddress = \"192.0.2.0/24\"\n";
    let facing = "192.0.2.7".parse().expect("an address");
    for (file, roce, there, listening) in [
        ("", false, Llp::Tcp, &[Llp::Tcp][..]),
        ("llp = \"sctp\"\n", false, Llp::Sctp, &[Llp::Sctp]),
        ("llp = \"sctp\"\n", true, Llp::Sctp, &[Llp::Tcp, Llp::Sctp]),
        (
            &format!("{far}llp = \"sctp\"\n"),
            false,
            Llp::Sctp,
            &[Llp::Tcp, Llp::Sctp],
        ),
        (
            &format!("llp = \"sctp\"\n{far}mpa.crc = true\n"),
            false,
            Llp::Sctp,
            &[Llp::Sctp],
        ),
        (
            &format!("llp = \"sctp\"\n{far}profile = \"siw\"\n"),
            false,
            Llp::Tcp,
            &[Llp::Tcp, Llp::Sctp],
        ),
    ] {
        let mut config = Config::default();
        config.set_file(file, Path::new("x")).expect("good");
        config.identity = if roce { Identity::Roce } else { Identity::Iwarp };
        assert_eq!(config.llp_facing(facing), there, "{file}");
        assert_eq!(config.llps(), listening, "{file}");
        let elsewhere = config.llp_facing("198.51.100.1".parse().expect("an address"));
        assert_eq!(elsewhere, config.llp, "{file}");
    }
}

/// RoCE v2 is for those that are named: whether it is the wire to the peer of the section, to
/// others, and to some peer.
#[test]
fn peers_have_their_own_wire() {
    let far = "[[peer]]\naddress = \"192.0.2.0/24\"\n";
    let facing = "192.0.2.7".parse().expect("an address");
    let elsewhere = "198.51.100.1".parse().expect("an address");
    for (file, roce_there, roce_elsewhere, to_some) in [
        (String::new(), false, false, false),
        ("wire = \"iwarp\"\n".to_owned(), false, false, false),
        ("wire = \"roce\"\n".to_owned(), true, true, true),
        (format!("{far}wire = \"roce\"\n"), true, false, true),
        (format!("{far}wire = \"auto\"\n"), false, false, false),
        (
            format!("wire = \"roce\"\n{far}wire = \"iwarp\"\n"),
            false,
            true,
            true,
        ),
    ] {
        let mut config = Config::default();
        config.set_file(&file, Path::new("x")).expect("good");
        assert!(!config.speaks_roce_to(facing), "an RNIC: {file}");
        assert!(!config.speaks_roce_to_some(), "an RNIC: {file}");
        config.identity = Identity::Roce;
        assert_eq!(config.speaks_roce_to(facing), roce_there, "{file}");
        assert_eq!(config.speaks_roce_to(elsewhere), roce_elsewhere, "{file}");
        assert_eq!(config.speaks_roce_to_some(), to_some, "{file}");
    }
}

#[test]
fn a_peer_is_checked_as_everything_else() {
    let complains = |text: &str, about: &str| {
        let error = Config::default()
            .set_file(text, Path::new("x"))
            .expect_err(text)
            .to_string();
        assert!(
            error.starts_with("x, line ") && error.contains(about) && !error.contains('\n'),
            "{error}"
        );
    };
    complains("[[peer]]\nmpa.crc = true", "a [[peer]] needs address");
    complains("[[peer]]\naddress = \"192.0.2.1/24\"", "a [[peer]] needs address");
    complains("peer = [1]", "a [[peer]] is a section");
    complains("[peer]\naddress = \"::1\"", "no option peer.address");
    complains(
        "[[peer]]\naddress = \"::1\"\nmpa.crcs = 1",
        "did you mean mpa.crc?",
    );
    complains(
        "[[peer]]\naddress = \"::1\"\nmpa.revision = 3",
        "mpa.revision cannot be 3",
    );
    complains(
        "[[peer]]\naddress = \"::1\"\nnative.listen = \"::1\"",
        "cannot have native.listen",
    );
}

#[test]
fn a_missing_or_endless_file_is_an_error_not_a_wait() {
    assert!(complaint(&[("URNIC_CONFIG", "/no/such/file")]).starts_with("/no/such/file: cannot read it: "));
    assert!(matches!(
        load(&[("URNIC_CONFIG", "/dev/zero")]),
        Err(Error::File {
            errno: Errno::FBIG,
            ..
        })
    ));
}

#[test]
fn a_capture_of_a_remote_device_is_refused() {
    let path = |config: Config| config.pcap;
    assert_eq!(load(&[("URNIC_PCAP", "/x")]).map(path), Ok(Some("/x".into())));
    for device in ["vfio-user:/s", "vfio:0000:01:00.0"] {
        let refused = complaint(&[("URNIC_PCAP", "/x"), ("URNIC_DEVICE", device)]);
        assert!(
            refused.contains(device) && refused.contains("urnic serve"),
            "{refused}"
        );
    }
    assert_eq!(load(&[("URNIC_PCAP", "")]), Ok(Config::default()));
}

#[test]
fn options_of_a_section_override_its_profile() {
    for (name, preset) in profile::PROFILES {
        let file = File::new(
            &format!("profile-{name}"),
            &format!(
                "[mpa]\nmarkers = true\nrtr_types = \"send\"\n[[peer]]\naddress = \"192.0.2.1\"\nprofile = \"{name}\"\nmpa.startup_timeout_initiator_s = 7\nmpa.strict_rtr = true\n"
            ),
        );
        let config = load(&[("URNIC_CONFIG", file.path())]).expect("good");
        let there = config.facing("192.0.2.1".parse().expect("an address"));
        for (key, value) in preset.iter().filter(|(key, _)| *key != "mpa.strict_rtr") {
            let opt = OPTIONS.iter().find(|opt| opt.key == *key).expect("an option");
            assert!(opt.is_per_peer(), "{key}");
            assert_eq!(opt.value(&there), *value, "{name}: {key}");
        }
        assert!(there.mpa.strict_rtr, "{name}");
        assert_eq!(there.mpa.startup_timeout_initiator.as_secs(), 7);
        let elsewhere = config.facing("192.0.2.2".parse().expect("an address"));
        assert!(elsewhere.mpa.markers);
    }
    let file = File::new(
        "profile-none",
        "[[peer]]\naddress = \"192.0.2.1\"\nprofile = \"erdma\"\n",
    );
    let refused = complaint(&[("URNIC_CONFIG", file.path())]);
    assert!(refused.contains("one of siw, cxgb4, irdma, strict"), "{refused}");
}

#[test]
fn empa_13_without_any_rtr_type_nothing_starts() {
    for none in ["none", ","] {
        let refused = complaint(&[("URNIC_MPA_RTR_TYPES", none)]);
        assert!(refused.contains("one or more of send, write, read"), "{refused}");
    }
}

#[test]
fn a_variable_that_is_not_text_is_refused() {
    use std::os::unix::ffi::OsStringExt;
    let bytes = OsString::from_vec(vec![0xff]);
    let error = Config::from_vars([(OsString::from("URNIC_LOG"), bytes)]).expect_err("refused");
    assert_eq!(error.to_string(), "URNIC_LOG: its value is not UTF-8");
}
