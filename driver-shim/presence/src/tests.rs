//! Trees on a real file system, in separate folders.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::redirect::{PathBuffer, Target};
use super::*;
use rustix::fd::AsFd as _;
use urnic_config::Identity;
use urnic_process::fds::InternalFd;
use urnic_process::netlink;
use urnic_testkit::Folder;

/// A private folder with trees.
struct Scratch(Folder);

impl Scratch {
    fn new() -> Scratch {
        Scratch(Folder::new("presence"))
    }

    fn settings(&self, digest: u64) -> Settings {
        Settings {
            dir: Some(self.0.path().to_owned()),
            digest,
            ..Settings::default()
        }
    }

    /// Names of the trees in the folder, finished or not.
    fn trees(&self) -> Vec<String> {
        let uid = rustix::process::geteuid().as_raw();
        let ours = self.0.file(&format!("urnic-{uid}"));
        let mut names: Vec<_> = fs::read_dir(ours)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        names
    }
}

/// The GID table of a host with one interface; this host's table may change while the tests run.
fn gids() -> GidTable {
    let lo = netlink::Link {
        index: 1,
        name: "lo".into(),
        up: true,
        mtu: 65536,
    };
    let address = |ip| netlink::InterfaceAddress {
        ip,
        prefix_len: 8,
        link: 1,
    };
    let addresses = [
        address([127, 0, 0, 1].into()),
        address([0, 0, 0, 0, 0, 0, 0, 1].into()),
    ];
    GidTable::new(&[lo], &addresses, None)
}

fn presence(settings: &Settings) -> Presence {
    fds::adopt_process();
    Presence::build(identity::Scope::current(), vec![gids()], settings).unwrap()
}

fn line(root: &Path, path: &str) -> String {
    let text = fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    text.strip_suffix('\n').unwrap().to_owned()
}

#[test]
fn the_tree_shows_an_rnic_as_the_kernel_would() {
    let scratch = Scratch::new();
    let presence = presence(&scratch.settings(0));
    let root = presence.root();
    let verbs = format!("sys/class/infiniband_verbs/{}", presence.devices()[0].uverbs());
    assert_eq!(line(root, "sys/class/infiniband_verbs/abi_version"), "6");
    assert_eq!(line(root, &format!("{verbs}/ibdev")), "urnic0");
    assert_eq!(line(root, &format!("{verbs}/dev")), "1:3");
    assert_eq!(line(root, "sys/class/infiniband/urnic0/node_type"), "4: RNIC");
    assert_eq!(
        line(root, "sys/class/infiniband/urnic0/node_guid"),
        identity::guid_text(presence.devices()[0].node_guid())
    );
    assert_eq!(
        line(root, "sys/class/infiniband/urnic0/ports/1/pkeys/0"),
        "0xffff"
    );
    assert!(
        fs::metadata(root.join(format!("{verbs}/device/net")))
            .unwrap()
            .is_dir()
    );
    let node = fs::metadata(root.join(format!("dev/infiniband/{}", presence.devices()[0].uverbs()))).unwrap();
    assert_eq!(node.rdev(), fs::metadata("/dev/null").unwrap().rdev());
}

#[test]
fn every_gid_has_its_files_and_there_is_none_too_many() {
    let scratch = Scratch::new();
    let presence = presence(&scratch.settings(0));
    let port = presence.root().join("sys/class/infiniband/urnic0/ports/1");
    for (index, gid) in presence.devices()[0].gids().entries().iter().enumerate() {
        assert_eq!(
            line(&port, &format!("gids/{index}")),
            identity::words(&gid.bytes())
        );
        assert_eq!(line(&port, &format!("gid_attrs/ndevs/{index}")), gid.netdev);
        assert_eq!(line(&port, &format!("gid_attrs/types/{index}")), "IB/RoCE v1");
    }
    assert_eq!(
        fs::read_dir(port.join("gids")).unwrap().count(),
        presence.devices()[0].gids().entries().len()
    );
}

#[test]
fn a_roce_nic_has_two_gids_for_each_address() {
    let scratch = Scratch::new();
    let mut settings = scratch.settings(0);
    settings.config.identity = Identity::Roce;
    let presence = presence(&settings);
    let device = presence.root().join("sys/class/infiniband/urnic0");
    assert_eq!(line(&device, "node_type"), "1: CA");
    let port = device.join("ports/1");
    assert_eq!(line(&port, "lid"), "0x0");
    let types: Vec<String> = (0..6)
        .map(|index| line(&port, &format!("gid_attrs/types/{index}")))
        .collect();
    assert_eq!(
        types,
        [
            "IB/RoCE v1",
            "RoCE v2",
            "IB/RoCE v1",
            "RoCE v2",
            "IB/RoCE v1",
            "RoCE v2"
        ]
    );
    assert_eq!(line(&port, "gids/1"), "fe80:0000:0000:0000:0000:5efe:7f00:0001");
    assert_eq!(line(&port, "gids/3"), "0000:0000:0000:0000:0000:ffff:7f00:0001");
    assert_eq!(line(&port, "gid_attrs/ndevs/3"), "lo");
    assert_eq!(fs::read_dir(port.join("gids")).unwrap().count(), 6);
}

#[test]
fn a_tree_is_shared_and_never_touched_again() {
    let scratch = Scratch::new();
    let one = presence(&scratch.settings(0));
    let device = one.root().join("sys/class/infiniband/urnic0");
    let before = fs::metadata(&device).unwrap();
    let two = presence(&scratch.settings(0));
    assert_eq!(one.root(), two.root());
    let after = fs::metadata(&device).unwrap();
    assert_eq!(
        (before.ino(), before.mtime(), before.ctime()),
        (after.ino(), after.mtime(), after.ctime())
    );
    assert_eq!(scratch.trees().len(), 1);
}

#[test]
fn a_tree_built_again_is_the_same_device_to_libibverbs() {
    let scratch = Scratch::new();
    let one = presence(&scratch.settings(0));
    let device = one.root().join("sys/class/infiniband/urnic0");
    let before = fs::metadata(&device).unwrap();
    fs::remove_dir_all(one.root()).unwrap();
    let two = presence(&scratch.settings(0));
    assert_eq!(one.root(), two.root());
    let after = fs::metadata(&device).unwrap();
    assert_eq!(
        (before.mtime(), before.mtime_nsec()),
        (after.mtime(), after.mtime_nsec())
    );
}

#[test]
fn another_configuration_is_another_tree() {
    let scratch = Scratch::new();
    let one = presence(&scratch.settings(1));
    let two = presence(&scratch.settings(2));
    assert_ne!(one.root(), two.root());
    assert_eq!(one.devices()[0].node_guid(), two.devices()[0].node_guid());
}

#[test]
fn many_builders_make_one_tree() {
    let scratch = Scratch::new();
    fds::adopt_process();
    let presences: Vec<Presence> = std::thread::scope(|scope| {
        let settings = scratch.settings(0);
        let builders: Vec<_> = (0..8)
            .map(|_| {
                let settings = settings.clone();
                scope.spawn(move || {
                    Presence::build(identity::Scope::current(), vec![gids()], &settings).unwrap()
                })
            })
            .collect();
        builders
            .into_iter()
            .map(|builder| builder.join().unwrap())
            .collect()
    });
    assert!(
        presences
            .iter()
            .all(|presence| presence.root() == presences[0].root())
    );
    assert_eq!(scratch.trees().len(), 1);
}

fn small_plan(name: &str) -> tree::Plan {
    tree::Plan {
        name: name.to_owned(),
        items: vec![
            tree::Item::File("a/b".into(), b"c".to_vec()),
            tree::Item::Link("l".into(), "/".into()),
        ],
        dated: vec!["a".into()],
        time: 1_000_000_000,
    }
}

#[test]
fn unused_old_trees_are_removed() {
    let scratch = Scratch::new();
    fds::adopt_process();
    let homes = [scratch.0.path().to_owned()];
    let used = tree::provide(&small_plan("used"), &homes).unwrap();
    drop(tree::provide(&small_plan("unused"), &homes).unwrap());
    let _new = tree::provide(&small_plan("new"), &homes).unwrap();
    assert_eq!(scratch.trees(), ["new", "unused", "used"], "young trees stay");
    let ours = OwnFolder::provide(scratch.0.path()).unwrap();
    tree::reap_older_than(ours.as_fd(), "new", std::time::Duration::ZERO);
    assert_eq!(scratch.trees(), ["new", "used"]);
    drop(used);
    tree::reap_older_than(ours.as_fd(), "new", std::time::Duration::ZERO);
    assert_eq!(scratch.trees(), ["new"]);
    assert!(Path::new("/").exists());
}

#[test]
fn a_tree_that_another_locks_to_remove_it_is_replaced() {
    let scratch = Scratch::new();
    fds::adopt_process();
    let homes = [scratch.0.path().to_owned()];
    let first = tree::provide(&small_plan("tree"), &homes).unwrap().root;
    let reaper = fs::File::open(&first).unwrap();
    rustix::fs::flock(&reaper, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let other = tree::provide(&small_plan("tree"), &homes).unwrap();
    assert_ne!(other.root, first);
    assert_eq!(fs::read(other.root.join("a/b")).unwrap(), b"c");
    drop(reaper);
    assert_eq!(tree::provide(&small_plan("tree"), &homes).unwrap().root, first);
}

/// The folders of this user in a home where the usual name is taken.
fn others(home: &Path) -> Vec<String> {
    let prefix = usual_name() + "-";
    let mut names: Vec<String> = fs::read_dir(home)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(&prefix))
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn where_the_usual_name_is_taken_another_folder_is_used() {
    let scratch = Scratch::new();
    let home = scratch.0.path();
    let usual = scratch.0.file(&usual_name());
    fs::create_dir(&usual).unwrap();
    fs::set_permissions(&usual, fs::Permissions::from_mode(0o755)).unwrap();
    let one = presence(&scratch.settings(0));
    assert_eq!(fs::read_dir(&usual).unwrap().count(), 0, "others may enter it");
    let [other] = &others(home)[..] else {
        panic!("{:?}", others(home))
    };
    assert!(one.root().starts_with(home.join(other)));
    assert_eq!(
        fs::metadata(home.join(other)).unwrap().permissions().mode() & 0o7777,
        0o700
    );
    assert_eq!(
        presence(&scratch.settings(0)).root(),
        one.root(),
        "found by the next"
    );
    assert_eq!(
        OwnFolder::provide(home).unwrap().taken(),
        Some(Refusal::Open(0o755))
    );
    let found: Vec<_> = OwnFolder::all(home)
        .iter()
        .map(|one| one.path().to_owned())
        .collect();
    assert_eq!(found, [home.join(other)]);
    fs::set_permissions(&usual, fs::Permissions::from_mode(0o700)).unwrap();
    assert!(presence(&scratch.settings(0)).root().starts_with(&usual));
    assert_eq!(OwnFolder::all(home).len(), 2);
}

#[test]
fn a_file_or_link_in_the_place_of_our_folder_is_not_used() {
    let scratch = Scratch::new();
    let usual = scratch.0.file(&usual_name());
    let elsewhere = scratch.0.file("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &usual).unwrap();
    presence(&scratch.settings(0));
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    fs::remove_file(&usual).unwrap();
    fs::write(&usual, "").unwrap();
    presence(&scratch.settings(0));
    assert_eq!(
        OwnFolder::provide(scratch.0.path()).unwrap().taken(),
        Some(Refusal::NoFolder)
    );
    assert_eq!(others(scratch.0.path()).len(), 1);
}

#[test]
fn a_home_in_which_others_may_rename_is_not_used() {
    let scratch = Scratch::new();
    let home = scratch.0.path();
    fs::set_permissions(home, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = Presence::build(identity::Scope::current(), vec![gids()], &scratch.settings(0));
    assert_eq!(refused.unwrap_err(), Errno::PERM);
    assert_eq!(OwnFolder::provide(home).unwrap_err(), Refusal::Shared(0o777));
    for mode in [0o1777, 0o775] {
        fs::set_permissions(home, fs::Permissions::from_mode(mode)).unwrap();
        presence(&scratch.settings(0));
    }
}

/// Root can give folders to another user.
#[test]
fn a_folder_or_home_of_another_user_is_not_used() {
    const STRANGER: u32 = 61234;
    let scratch = Scratch::new();
    let home = scratch.0.path();
    let usual = scratch.0.file(&usual_name());
    fs::create_dir(&usual).unwrap();
    fs::set_permissions(&usual, fs::Permissions::from_mode(0o700)).unwrap();
    if std::os::unix::fs::chown(&usual, Some(STRANGER), None).is_err() {
        // Nobody else can give a folder away; the system tests have the case as well.
        return;
    }
    let theirs = scratch.0.file(&(usual_name() + "-0123456789abcdef"));
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(STRANGER), None).unwrap();
    let presence = presence(&scratch.settings(0));
    assert!(!presence.root().starts_with(&usual) && !presence.root().starts_with(&theirs));
    assert_eq!(
        OwnFolder::provide(home).unwrap().taken(),
        Some(Refusal::OfUser(STRANGER))
    );
    assert_eq!(OwnFolder::all(home).len(), 1);
    assert_eq!(OwnFolder::open(&usual).unwrap_err(), Refusal::OfUser(STRANGER));
    std::os::unix::fs::chown(home, Some(STRANGER), None).unwrap();
    assert_eq!(OwnFolder::provide(home).unwrap_err(), Refusal::OfUser(STRANGER));
    assert!(OwnFolder::all(home).is_empty());
    presence.folder().unwrap_err();
}

#[test]
fn real_devices_stay_visible_and_keep_their_names() {
    let scratch = Scratch::new();
    fds::adopt_process();
    let real = plan::RealDevices::fake(&["mlx5_0"], &["abi_version", "uverbs0"], &["uverbs0", "rdma_cm"]);
    assert_eq!(real.free_uverbs().next().as_deref(), Some("uverbs1"));
    let settings = scratch.settings(0);
    let scope = identity::Scope::current();
    let devices = ["urnic0", "urnic1"].map(|name| (name.to_owned(), GidTable::default()));
    let devices = plan::shown(scope, &real, devices.into_iter());
    assert_eq!(devices[1].netlink_index(), 0x4000_0001);
    let inputs = plan::Inputs {
        scope,
        devices: &devices,
        real: &real,
        settings: &settings,
    };
    let tree = tree::provide(&inputs.plan(), &[scratch.0.path().to_owned()]).unwrap();
    for (link, target) in [
        ("sys/class/infiniband/mlx5_0", "/sys/class/infiniband/mlx5_0"),
        (
            "sys/class/infiniband_verbs/uverbs0",
            "/sys/class/infiniband_verbs/uverbs0",
        ),
        ("dev/infiniband/rdma_cm", "/dev/null"),
        ("dev/infiniband/uverbs0", "/dev/infiniband/uverbs0"),
        ("dev/infiniband/uverbs1", "/dev/null"),
        ("dev/infiniband/uverbs2", "/dev/null"),
    ] {
        assert_eq!(fs::read_link(tree.root.join(link)).unwrap(), Path::new(target));
    }
    assert_eq!(line(&tree.root, "sys/class/infiniband_verbs/abi_version"), "6");
    assert_eq!(
        line(&tree.root, "sys/class/infiniband/urnic0/ports/1/state"),
        "1: DOWN",
        "no address, no link"
    );
}

#[test]
fn paths_lead_into_the_tree() {
    let scratch = Scratch::new();
    let presence = presence(&scratch.settings(0));
    let mut buffer = PathBuffer::new();
    let mut redirected = |path: &str| {
        let path = CString::new(path).unwrap();
        let (path, target) = presence.redirect(&path, &mut buffer)?;
        Some((path.to_str().unwrap().to_owned(), target))
    };
    let under = |path: &str| format!("{}{path}", presence.root().display());
    let node = format!("/dev/infiniband/{}", presence.devices()[0].uverbs());
    for (path, target) in [
        ("/sys/class/infiniband", Target::Tree),
        ("/sys/class/infiniband_verbs", Target::DeviceScan),
        ("/sys/class/infiniband_verbs/", Target::DeviceScan),
        ("/sys/class/infiniband_verbs/abi_version", Target::Tree),
        (node.as_str(), Target::Uverbs),
        ("/dev/infiniband/rdma_cm", Target::RdmaCm),
        ("/dev/infiniband/umad0", Target::Tree),
    ] {
        assert_eq!(redirected(path), Some((under(path), target)));
    }
    assert_eq!(redirected("/dev/null"), None);
    let long = format!("/sys/class/infiniband/{}", "x".repeat(redirect::PATH_MAX));
    assert_eq!(redirected(&long), None, "too long for the kernel as well");
}

#[test]
fn internal_fds_are_high_and_close_with_their_owner() {
    fds::adopt_process();
    let fd = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    let low = fds::number(&fd);
    let internal = InternalFd::of_device(fd).unwrap();
    let number = fds::number(&internal.get().unwrap());
    assert!(number > low);
    assert_eq!(fds::kind(number), Some(fds::Kind::Device));
    assert!(fds::ours_within(0, u32::MAX).any(|ours| ours == (number, fds::Kind::Device)));
    assert!(fds::ours_within(number as u32 + 1, number as u32 + 1).all(|(fd, _)| fd != number));
    drop(internal);
    assert_eq!(fds::kind(number), None);
}

#[test]
fn a_claimed_fd_is_internal_until_it_is_disclaimed() {
    fds::adopt_process();
    // No code in this test program opens a file with this number.
    let number = 900_000;
    fds::claim(number);
    assert_eq!(fds::kind(number), Some(fds::Kind::Claimed));
    assert!(fds::Kind::Claimed.is_internal());
    fds::disclaim(number);
    fds::disclaim(number);
    assert_eq!(fds::kind(number), None);
}

#[test]
fn each_device_has_entries_of_its_own() {
    let scratch = Scratch::new();
    let mut settings = scratch.settings(0);
    settings.config.name = "mlx5_0".to_owned();
    settings.config.devices = 2;
    fds::adopt_process();
    let tables = vec![
        gids(),
        gids().of_addresses(&["127.0.0.1".parse().unwrap()]).unwrap(),
    ];
    let presence = Presence::build(identity::Scope::current(), tables, &settings).unwrap();
    let [first, second] = presence.devices() else {
        panic!("{presence:?}")
    };
    assert_ne!(first.node_guid(), second.node_guid());
    for (index, (device, name, gids)) in [(first, "mlx5_0", 2), (second, "mlx5_1", 1)]
        .into_iter()
        .enumerate()
    {
        assert_eq!((device.index(), device.name()), (index, name));
        let folder = format!("sys/class/infiniband/{name}");
        assert_eq!(
            line(presence.root(), &format!("{folder}/node_guid")),
            identity::guid_text(device.node_guid())
        );
        let shown = fs::read_dir(presence.root().join(format!("{folder}/ports/1/gids"))).unwrap();
        assert_eq!(shown.count(), gids);
        let verbs = format!("sys/class/infiniband_verbs/{}", device.uverbs());
        assert_eq!(line(presence.root(), &format!("{verbs}/ibdev")), name);
        assert!(
            presence
                .root()
                .join(format!("{verbs}/device/net/lo"))
                .is_symlink()
        );
        let mut buffer = PathBuffer::new();
        let mut target = |path: String| {
            let path = CString::new(path).unwrap();
            presence.redirect(&path, &mut buffer).unwrap().1
        };
        assert_eq!(
            target(format!("/dev/infiniband/{}", device.uverbs())),
            Target::Uverbs
        );
        let counter = target(format!("/{folder}/ports/1/hw_counters/tx_bytes"));
        assert_eq!(
            counter,
            Target::HwCounter(index, HwCounter::Device(urnic_device::counter::Counter::TxBytes))
        );
    }
}
