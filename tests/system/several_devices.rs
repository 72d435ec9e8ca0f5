//! The device's name, and several devices in one process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::debian::Debian;
use urnic_tests::netns::Netns;
use urnic_tests::program::{Program, Running};
use urnic_tests::served::in_process;
use urnic_tests::skip::{installed, root};
use urnic_tests::user::{NOBODY, Staged};
use urnic_tests::wait::{TIME_LIMIT, free_port, until};
use urnic_tests::{Pair, compiled, or_skip};

use crate::devices::gids;
use crate::rdma_cm::but_for_lost_races;
use crate::roce::roce;
use crate::roce_datagrams::{GROUP_PORT, UDADDY_PORT};

const LIMIT: Duration = Duration::from_secs(120);

/// A program that sees two devices.
fn two(name: impl AsRef<std::ffi::OsStr>) -> Program {
    Program::new(name).env("URNIC_DEVICES", "2")
}

/// Names and node GUIDs that `ibv_devices` lists.
fn listed(program: Program) -> Vec<(String, String)> {
    let text = program.run().success();
    let device = |line: &str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    };
    text.lines().skip(2).filter_map(device).collect()
}

fn names(devices: &[(String, String)]) -> Vec<&str> {
    devices.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn programs_find_the_name_that_they_expect() {
    or_skip!(installed("ibv_rc_pingpong"));
    let named = |program: Program| program.env("URNIC_NAME", "mlx5_0");
    assert_eq!(names(&listed(named(Program::new("ibv_devices")))), ["mlx5_0"]);
    Pair::new(&named(Program::new("ibv_rc_pingpong").line("-d mlx5_0 -n 100"))).succeeds();
    let info = named(Program::plain(urnic()).arg("info")).run().success();
    assert!(info.starts_with("mlx5_0\n"), "{info}");
}

#[test]
fn each_device_has_a_guid_of_its_own() {
    or_skip!(installed("ibv_devices"));
    let three = || listed(Program::new("ibv_devices").env("URNIC_DEVICES", "3"));
    let first = three();
    assert_eq!(names(&first), ["urnic0", "urnic1", "urnic2"]);
    let mut guids: Vec<_> = first.iter().map(|(_, guid)| guid).collect();
    guids.sort();
    guids.dedup();
    assert_eq!(guids.len(), 3, "{first:?}");
    assert_eq!(three(), first, "GUIDs stay");
    let single = listed(Program::new("ibv_devices"));
    assert_eq!(
        single.as_slice(),
        &first[..1],
        "the first is the only device of others"
    );
}

#[test]
fn the_other_debian_lists_each_device() {
    let debian = or_skip!(Debian::other());
    let text = debian.program(two("ibv_devinfo")).run().success();
    for name in ["hca_id:\turnic0", "hca_id:\turnic1"] {
        assert!(text.contains(name), "{text}");
    }
}

#[test]
fn an_ordinary_user_has_several_devices() {
    or_skip!(root());
    or_skip!(installed("ibv_rc_pingpong"));
    let staged = Staged::new();
    let devices = listed(staged.program(NOBODY, two("ibv_devices")));
    assert_eq!(names(&devices), ["urnic0", "urnic1"]);
    let pingpong = two("ibv_rc_pingpong").line("-d urnic1 -n 100");
    Pair::new(&staged.program(NOBODY, pingpong)).succeeds();
}

#[test]
fn programs_on_different_devices_reach_each_other() {
    or_skip!(installed("ibv_rc_pingpong"));
    for options in ["-n 100", "-g 0 -e -n 100"] {
        let mut pair = Pair::new(&two("ibv_rc_pingpong").line(options));
        pair.server = pair.server.line("-d urnic0");
        pair.client = pair.client.line("-d urnic1");
        pair.succeeds();
    }
}

#[test]
fn perftest_on_the_second_device() {
    or_skip!(installed("ib_write_bw"));
    for name in ["ib_write_bw", "ib_send_lat"] {
        Pair::new(&two(name).line("-d urnic1 -F -n 200")).succeeds();
    }
}

#[test]
fn devices_of_one_process_reach_each_other_also_after_a_fork() {
    let rails = or_skip!(compiled("rails"));
    let text = Program::new(rails).env("URNIC_DEVICES", "4").run().success();
    assert!(text.contains("4 devices"), "{text}");
}

#[test]
fn each_device_has_counters_of_its_own() {
    let place = Folder::inside(&scratch(), "devices-stat");
    let program = Program::new(or_skip!(compiled("rails")))
        .arg("wait")
        .env("URNIC_DEVICES", "3")
        .env("URNIC_PRESENT_DIR", place.path());
    let mut running = program.spawn();
    running.wait_for_output("its end", |text| text.contains("3 devices").then_some(()));
    let pid = running.pid();
    let stat = |line: &str| {
        Program::plain(urnic())
            .arg("stat")
            .line(line)
            .env("URNIC_PRESENT_DIR", place.path())
            .run()
            .success()
    };
    // Twice, before and after the fork: in each direction a message of 1000 bytes between the first
    // two devices, and one of 2000 between the last two.
    let json = stat("--json");
    for (name, bytes) in [("urnic0", 2000), ("urnic1", 6000), ("urnic2", 4000)] {
        let (_, device) = json.split_once(&format!("\"name\":\"{name}\"")).expect(&json);
        let (_, received) = device.split_once("\"rx_bytes\":").expect(device);
        let received: String = received.chars().take_while(char::is_ascii_digit).collect();
        let received: u64 = received.parse().expect(&json);
        // With the headers.
        assert!((bytes..bytes + 1000).contains(&received), "{name}: {json}");
    }
    let one = stat(&pid.to_string());
    for name in ["urnic0", "urnic1", "urnic2"] {
        assert!(one.contains(&format!("process {pid}, rails, {name}: ")), "{one}");
    }
    let counter = "/sys/class/infiniband/urnic2/ports/1/hw_counters/rx_bytes";
    let seen = Program::new("cat")
        .arg(counter)
        .env("URNIC_DEVICES", "3")
        .env("URNIC_PRESENT_DIR", place.path())
        .run()
        .success();
    let seen: u64 = seen.trim().parse().expect("a number");
    assert!((4000..5000).contains(&seen), "{seen}");
    running.signal(Signal::KILL);
}

#[test]
fn one_capture_has_an_interface_for_each_device() {
    or_skip!(in_process("the wire is in the server"));
    let folder = Folder::inside(&scratch(), "devices-pcap");
    let file = folder.file("wire.pcapng");
    let program = Program::new(or_skip!(compiled("rails")))
        .env("URNIC_DEVICES", "2")
        .env("URNIC_PCAP", &file);
    program.run().success();
    let bytes = std::fs::read(&file).expect("the capture");
    for name in [b"urnic0", b"urnic1"] {
        assert!(bytes.windows(name.len()).any(|part| part == name));
    }
    // The forked child has a file of its own.
    assert_eq!(folder.names().len(), 2, "{:?}", folder.names());
}

#[test]
fn a_name_of_a_device_that_cannot_be_is_one_line() {
    for (variable, value, says) in [
        ("URNIC_NAME", "a/b", "name cannot be a/b"),
        (
            "URNIC_DEVICES",
            "65",
            "devices cannot be 65: it takes a number from 1 to 64",
        ),
    ] {
        let ended = Program::plain(urnic())
            .line("run -- true")
            .env(variable, value)
            .run();
        assert_eq!(ended.status.code(), Some(2), "{ended}");
        assert!(
            ended.output.contains(says) && ended.output.lines().count() == 1,
            "{ended}"
        );
    }
}

/// A folder with the file of a host of [`Netns::rails`], with this number at the end of its
/// addresses.
struct Rails(Folder);

impl Rails {
    fn new(name: &str) -> Rails {
        let folder = Folder::inside(&scratch(), name);
        for number in 1..=2 {
            let section = |rail| format!("[[device]]\naddresses = [\"10.77.{rail}.{number}\"]\n");
            let text = section(0) + &section(1);
            std::fs::write(folder.file(&format!("host{number}.toml")), text).expect("a file of ours");
        }
        Rails(folder)
    }

    fn file(&self, number: usize) -> PathBuf {
        self.0.file(&format!("host{number}.toml"))
    }
}

fn at(netns: &Netns, file: &Path, program: Program) -> Program {
    netns.program(program.env("URNIC_CONFIG", file))
}

#[test]
fn each_rail_is_a_device_with_its_addresses() {
    or_skip!(installed("ibv_devinfo"));
    or_skip!(in_process("the devices have addresses of the host"));
    let [host, _other] = or_skip!(Netns::rails());
    let rails = Rails::new("rails-shown");
    for rail in 0..2 {
        let info = Program::new("ibv_devinfo").line(&format!("-v -d urnic{rail}"));
        let address: std::net::Ipv4Addr = [10, 77, rail, 1].into();
        assert_eq!(gids(&at(&host, &rails.file(1), info)), [address.to_ipv6_mapped()]);
        let netdev = format!("/sys/class/infiniband/urnic{rail}/ports/1/gid_attrs/ndevs/0");
        let netdev = at(&host, &rails.file(1), Program::new("cat").arg(netdev))
            .run()
            .success();
        assert_eq!(netdev.trim(), format!("rail{rail}"));
    }
}

#[test]
fn an_id_gets_the_device_that_has_its_address() {
    or_skip!(installed("rping"));
    or_skip!(in_process("the devices have addresses of the host"));
    let hosts = or_skip!(Netns::rails());
    let rails = Rails::new("rails-rping");
    // The queue pair is made on the id's device, and is attached only to a stream of that device.
    // The server listens on any address, or on that of its second device. With a RoCE NIC, its port
    // is not that of TCP.
    for (identity, server, client) in [
        ("iwarp", "", "-a 10.77.0.1"),
        ("iwarp", "", "-a 10.77.1.1"),
        ("iwarp", "-a 10.77.1.1", "-a 10.77.1.1 -I 10.77.1.2"),
        ("iwarp", "-a 10.77.0.1", "-a 10.77.0.1"),
        ("roce", "", "-a 10.77.0.1"),
        ("roce", "", "-a 10.77.1.1"),
        ("roce", "-a 10.77.1.1", "-a 10.77.1.1 -I 10.77.1.2"),
    ] {
        let (server, client) = but_for_lost_races(|| {
            let port = free_port();
            let run = |number: usize, options: &str| {
                let program = Program::new("rping").line(&format!("{options} -C 3 -p {port}"));
                let program = program.env("URNIC_IDENTITY", identity);
                at(&hosts[number - 1], &rails.file(number), program)
            };
            let server: Running = run(1, &format!("-s {server}")).spawn();
            hosts[0].listens(port);
            let client = run(2, &format!("-c -v {client}")).spawn().wait_for(LIMIT);
            (server.wait_for(LIMIT), client)
        });
        assert!(client.output.contains("rdma-ping-2"), "{client}\n{server}");
    }
}

#[test]
fn datagrams_of_rdma_cm_use_the_device_that_has_the_address() {
    or_skip!(installed("udaddy"));
    or_skip!(in_process("the devices have addresses of the host"));
    let hosts = or_skip!(Netns::rails());
    let rails = Rails::new("rails-udaddy");
    let run = |number: usize, name: &str, options: &str| {
        let program = roce(name).line(options);
        at(&hosts[number - 1], &rails.file(number), program)
    };
    // A server on any address has a port at each: of both devices, and of loopback.
    for (sockets, server, client) in [
        (3, "", "-s 10.77.0.1"),
        (3, "", "-s 10.77.1.1"),
        (1, "-b 10.77.1.1", "-s 10.77.1.1"),
        (1, "-b 10.77.1.1", "-s 10.77.1.1 -b 10.77.1.2"),
    ] {
        let server = run(1, "udaddy", server).spawn();
        hosts[0].has_udp_sockets(UDADDY_PORT, sockets);
        let client = run(2, "udaddy", client).run_for(LIMIT);
        let said = client.success();
        assert!(said.contains("data transfers complete"), "{said}");
        server.wait_for(LIMIT).success();
    }
    for rail in 0..2 {
        let receiver = run(1, "mckey", &format!("-m 239.0.1.1 -b 10.77.{rail}.1")).spawn();
        hosts[0].has_udp_sockets(GROUP_PORT, 1);
        let sender = format!("-s -m 239.0.1.1 -b 10.77.{rail}.2");
        run(2, "mckey", &sender).run_for(LIMIT).success();
        let said = receiver.wait_for(LIMIT).success();
        assert!(said.contains("data transfers complete"), "{said}");
    }
}

#[test]
fn native_connections_between_rails() {
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(in_process("the devices have addresses of the host"));
    let hosts = or_skip!(Netns::rails());
    let rails = Rails::new("rails-native");
    for rail in 0..2 {
        let pingpong = Program::new("ibv_rc_pingpong").line(&format!("-d urnic{rail} -g 0 -n 200"));
        let mut pair = Pair::new(&pingpong).at(&format!("10.77.{rail}.1"));
        pair.server = at(&hosts[0], &rails.file(1), pair.server);
        pair.client = at(&hosts[1], &rails.file(2), pair.client);
        pair.succeeds();
    }
}

#[test]
fn an_address_of_no_interface_is_one_line() {
    or_skip!(installed("ibv_devices"));
    or_skip!(in_process("the devices have addresses of the host"));
    let folder = Folder::inside(&scratch(), "rails-wrong");
    let file = folder.file("wrong.toml");
    // TEST-NET-3 (RFC 5737): no machine has this address.
    std::fs::write(&file, "[[device]]\n[[device]]\naddresses = [\"203.0.113.1\"]\n").expect("a file of ours");
    let ended = Program::new("ibv_devices").env("URNIC_CONFIG", &file).run();
    let line =
        "no interface of this host that is up has 203.0.113.1, an address of urnic1: `ip address` lists them";
    assert_eq!(ended.output.matches(line).count(), 1, "{ended}");
    assert!(listed(Program::new("ibv_devices")).len() == 1);
}

#[test]
fn ucx_uses_both_rails() {
    or_skip!(installed("ucx_perftest"));
    let place = Folder::inside(&scratch(), "rails-ucx");
    let port = free_port();
    let run = |end: &str| {
        two("ucx_perftest")
            .line(&format!("-t tag_bw -s 1000000 -n 1000000 -p {port} {end}"))
            .env("URNIC_IDENTITY", "roce")
            .env("URNIC_PRESENT_DIR", place.path())
            .env("UCX_TLS", "rc,ud,self")
            .env("UCX_NET_DEVICES", "urnic0:1,urnic1:1")
    };
    let mut server = run("").spawn();
    server.wait_until_listening(port);
    let client = run("127.0.0.1").spawn();
    let both_send = until(TIME_LIMIT, || {
        let json = Program::plain(urnic())
            .line("stat --json")
            .arg(client.pid().to_string())
            .env("URNIC_PRESENT_DIR", place.path())
            .run();
        let sent = |device: &str| {
            let (_, device) = json.output.split_once(&format!("\"name\":\"{device}\""))?;
            let (_, sent) = device.split_once("\"rx_bytes\":")?;
            let (_, traffic) = device.split_once("\"tx_bytes\":")?;
            let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
            let sum = digits(sent).parse::<u64>().ok()? + digits(traffic).parse::<u64>().ok()?;
            (sum > 50_000_000).then_some(())
        };
        sent("urnic0").and(sent("urnic1"))
    });
    let said = client.output();
    client.signal(Signal::KILL);
    server.signal(Signal::KILL);
    assert!(both_send.is_some(), "{said}");
}

#[test]
fn the_loss_of_one_device_leaves_the_others() {
    or_skip!(installed("rping"));
    or_skip!(in_process("one of the devices is"));
    let hosts = or_skip!(Netns::rails());
    let rails = Rails::new("rails-lost");
    let socket = rails.0.file("s");
    let serve = Program::plain(urnic())
        .line("serve --addr 10.77.1.1 --socket")
        .arg(&socket);
    let serve = hosts[0].program(serve).spawn();
    assert!(
        until(TIME_LIMIT, || socket.exists().then_some(())).is_some(),
        "{}",
        serve.output()
    );
    let mixed = rails.0.file("mixed.toml");
    let text = format!(
        "[[device]]\naddresses = [\"10.77.0.1\"]\n[[device]]\ndevice = \"vfio-user:{}\"\n",
        socket.display()
    );
    std::fs::write(&mixed, text).expect("a file of ours");
    let port = free_port();
    let server = Program::new("rping").line(&format!("-s -P -p {port}"));
    let mut server = at(&hosts[0], &mixed, server).spawn();
    hosts[0].listens(port);
    let ping = |rail: u32| {
        let (client, _) = but_for_lost_races(|| {
            let client = Program::new("rping").line(&format!("-c -v -a 10.77.{rail}.1 -C 2 -p {port}"));
            let client = || {
                at(&hosts[1], &rails.file(2), client.clone())
                    .spawn()
                    .wait_for(LIMIT)
            };
            (client(), client())
        });
        client
    };
    for rail in [1, 0] {
        let client = ping(rail);
        assert!(
            client.output.contains("rdma-ping-1"),
            "{client}\n{}",
            server.output()
        );
    }
    serve.signal(Signal::KILL);
    server.wait_for_output("the loss", |text| {
        text.contains("the device is lost").then_some(())
    });
    let client = ping(0);
    assert!(
        client.output.contains("rdma-ping-1"),
        "{client}\n{}",
        server.output()
    );
    server.signal(Signal::KILL);
}
