//! Access control lists. The kernel's file system is the reference for the tree in memory.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in what they share"
)]

use super::*;
use proptest::prelude::*;
use std::io::Write as _;
use urnic_nfs::acl::{Acl, Entry as Ace, MAX_ENTRIES, Tag};
use urnic_nfs::nfsacl::{self, ACCESS, ACCESS_COUNT, DEFAULT, DEFAULT_COUNT, List, Lists};
use urnic_nfs::rpc::{Call, NoResults, Refusal, results};
use urnic_nfs::tree::Acls;
use urnic_nfs::xdr::{Reader, Xdr};

/// A tree of a directory and a tree in memory. `None`, with a message, if there is no reference.
fn both(test: &str, for_others: bool) -> Option<(tempfile::TempDir, [Arc<Server>; 2])> {
    let skip = |why: &str| {
        // The message bypasses the test runner's capture.
        let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
    };
    if for_others && !rustix::process::geteuid().is_root() {
        skip("only root acts for others");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let directory = of_directory(folder.path(), OPEN);
    let mut client = client(&directory, true);
    let root = client.mount(b"/").unwrap();
    match client.acls(root, ACCESS) {
        Err(Error::Nfs(Status::NotSupported)) => {
            skip("the file system of temporary files has no access control lists");
            None
        }
        got => {
            got.unwrap();
            Some((folder, [directory, of_memory(64 << 20, OPEN)]))
        }
    }
}

fn list(entries: &[Ace]) -> List {
    List {
        count: entries.len() as u32,
        entries: entries.to_vec(),
    }
}

fn access(entries: &[Ace]) -> Lists {
    Lists {
        mask: ACCESS,
        access: list(entries),
        default: List::default(),
    }
}

fn ace(tag: Tag, id: u32, rights: u32) -> Ace {
    Ace { tag, id, rights }
}

fn ids() -> impl Strategy<Value = u32> {
    prop_oneof![8 => Just(0), 24 => 1001..1004_u32, 1 => Just(u32::MAX)]
}

/// Entries that often form a valid list.
fn entries() -> impl Strategy<Value = Vec<Ace>> {
    let tags = Tag::ALL
        .iter()
        .copied()
        .filter(|tag| matches!(tag, Tag::User | Tag::Group));
    let named = (prop::sample::select(tags.collect::<Vec<_>>()), ids(), 0..8_u32);
    let base = [Tag::Owner, Tag::OwningGroup, Tag::Other, Tag::Mask];
    let fixed = (prop::array::uniform4(0..8_u32), 0..12_usize);
    (prop::collection::vec(named, 0..5), fixed).prop_map(move |(named, (rights, without))| {
        let named = named.into_iter().map(|(tag, id, rights)| ace(tag, id, rights));
        let fixed = (0..4)
            .filter(|n| *n != without)
            .map(|n| ace(base[n], 0, rights[n]));
        named.chain(fixed).collect()
    })
}

fn callers() -> Vec<Credential> {
    let of = |uid, groups: &[u32]| Credential::System {
        uid,
        gid: groups[0],
        groups: groups[1..].to_vec(),
    };
    let named = (1001..1005).flat_map(|uid| [of(uid, &[5000]), of(uid, &[1001, 1002]), of(uid, &[6, 1003])]);
    named.chain([of(0, &[0]), of(7, &[0]), of(7, &[9])]).collect()
}

/// The permissions of callers on a file, its mode, and its lists.
type Seen = (Vec<u32>, u32, Lists);

/// If the mode permits something to others and nothing to the group, Linux ignores named entries.
/// The draft permits these callers nothing, so their permissions are not compared.
fn seen(server: &Arc<Server>, file: Handle) -> Seen {
    let mode = client(server, true).attributes(file).unwrap().mode;
    let requested = if mode & 0o70 == 0 && mode & 0o7 != 0 {
        Vec::new()
    } else {
        callers()
    };
    let may = requested.into_iter().map(|caller| {
        let mut client = client(server, true);
        client.set_credential(caller);
        let requested = AccessArgs { file, access: 0x3f };
        let found = client.nfs::<AccessOk, Option<Attributes>>(Procedure::Access, &requested);
        found.unwrap().access
    });
    let mut client = client(server, true);
    let lists = client.acls(file, ACCESS | ACCESS_COUNT | DEFAULT | DEFAULT_COUNT);
    (may.collect(), mode, lists.unwrap())
}

fn chmod(client: &mut Client, file: Handle, mode: u32) {
    let attributes = SetAttributes {
        mode: Some(mode),
        ..SetAttributes::default()
    };
    let guard = None;
    let arguments = SetattrArgs {
        file,
        attributes,
        guard,
    };
    client.nfs::<Wcc, Wcc>(Procedure::Setattr, &arguments).unwrap();
}

/// Runs all operations on one file at a server, and returns the observations.
fn carried_out(
    server: &Arc<Server>,
    name: &str,
    (own, default): (&[Ace], &[Ace]),
    [before, after, below]: [u32; 3],
) -> Vec<Result<Seen, Status>> {
    let mut client = client(server, true);
    let root = client.mount(b"/").unwrap();
    let file = create(&mut client, root, format!("{name}-file").as_bytes(), before).unwrap();
    let dir = mkdir(&mut client, root, format!("{name}-dir").as_bytes()).unwrap();
    let both = Lists {
        mask: ACCESS | DEFAULT,
        access: list(own),
        default: list(default),
    };
    let mut all = Vec::new();
    for (handle, lists) in [(file, access(own)), (dir, both)] {
        let set = client
            .set_acls(handle, lists)
            .map_err(|error| status::<()>(Err(error)));
        all.push(set.map(|()| seen(server, handle)));
        all.push(Ok(seen(server, handle)));
        chmod(&mut client, handle, after);
        all.push(Ok(seen(server, handle)));
    }
    let inside = create(&mut client, dir, b"file", below).unwrap();
    let further = mkdir(&mut client, dir, b"dir").unwrap();
    all.extend([inside, further].map(|handle| Ok(seen(server, handle))));
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn lists_are_read_as_they_are_written(own in entries(), default in entries(), mask in 0..16_u32) {
        let lists = Lists { mask, access: list(&own), default: list(&default) };
        let mut bytes = Vec::new();
        lists.put(&mut bytes);
        let reader = &mut Reader(&bytes);
        prop_assert_eq!(Lists::take(reader), Ok(lists));
        prop_assert!(reader.0.is_empty());
        for len in 0..bytes.len() {
            prop_assert!(Lists::take(&mut Reader(&bytes[..len])).is_err());
        }
    }

    #[test]
    fn any_bytes_parse_as_lists_or_fail(bytes: Vec<u8>, words in words()) {
        let words: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        for bytes in [&bytes, &words] {
            let reader = &mut Reader(bytes);
            let taken = Lists::take(reader).ok();
            let expected = &mut bytes.as_chunks().0.iter().map(|word| u32::from_be_bytes(*word));
            prop_assert_eq!(&taken, &lists_of(expected));
            let Some(lists) = taken else { continue };
            prop_assert_eq!(bytes.len() - reader.0.len(), 4 * (bytes.len() / 4 - expected.count()));
            // A list that was parsed is the same after it is written and parsed again.
            let mut again = Vec::new();
            lists.put(&mut again);
            prop_assert_eq!(Lists::take(&mut Reader(&again)), Ok(lists.clone()));
            prop_assert_eq!(lists.change().is_ok(), can_be_set(&lists), "{:?}", lists);
        }
    }
}

/// Words that often form one list: a count, which is usually the number of entries, the number of
/// entries, and the entries.
fn list_words() -> impl Strategy<Value = Vec<u32>> {
    let tag = prop_oneof![
        8 => prop::sample::select(vec![1_u32, 2, 4, 8, 0x10, 0x20]),
        2 => prop::sample::select(vec![0x1001_u32, 0x1010, 0x1020]),
        1 => 0..70_u32,
    ];
    let rights = prop_oneof![20 => 0..8_u32, 1 => 8..16_u32];
    let any = prop::collection::vec((tag, ids(), rights), 0..5);
    let good = entries().prop_map(|entries| {
        let words = entries.iter().map(|ace| (ace.tag as u32, ace.id, ace.rights));
        words.collect::<Vec<_>>()
    });
    let off = prop_oneof![8 => Just(0_u32), 2 => 1..4_u32, 1 => 4..1100_u32];
    (prop_oneof![any, good], off).prop_map(|(entries, off)| {
        let len = entries.len() as u32;
        let entries = entries.iter().flat_map(|(tag, id, rights)| [*tag, *id, *rights]);
        [len ^ off, len].into_iter().chain(entries).collect()
    })
}

/// A mask and two lists. Words may be missing at the end.
fn words() -> impl Strategy<Value = Vec<u32>> {
    (0..20_u32, list_words(), list_words(), 0..8_usize).prop_map(|(mask, access, default, missing)| {
        let mut words = [vec![mask], access, default].concat();
        words.truncate(words.len() - missing / 7);
        words
    })
}

/// The lists that these words encode, by the definition of `secattr` and the limits of Linux.
fn lists_of(words: &mut impl Iterator<Item = u32>) -> Option<Lists> {
    let mask = words.next()?;
    let mut list = |bit| {
        let (count, len) = (words.next()?, words.next()?);
        if count.max(len) > 1024 || (mask & bit != 0 && count != len) {
            return None;
        }
        let entries = (0..len).map(|_| {
            let (tag, id, rights) = (words.next()? & !0x1000, words.next()?, words.next()?);
            let tag = Tag::ALL.iter().copied().find(|known| *known as u32 == tag)?;
            let rights = if tag == Tag::Mask { rights % 8 } else { rights };
            (rights < 8).then_some(Ace { tag, id, rights })
        });
        let entries = entries.collect::<Option<_>>()?;
        Some(List { count, entries })
    };
    let (access, default) = (list(1)?, list(4)?);
    Some(Lists {
        mask,
        access,
        default,
    })
}

/// Whether POSIX.1e permits lists of these entries, and the mask has only known bits.
fn can_be_set(lists: &Lists) -> bool {
    let is_list = |entries: &[Ace]| {
        let count = |tag| entries.iter().filter(|ace| ace.tag == tag).count();
        let named: Vec<_> = entries
            .iter()
            .filter(|ace| matches!(ace.tag, Tag::User | Tag::Group))
            .collect();
        let twice = named.iter().any(|one| {
            named
                .iter()
                .filter(|other| (other.tag, other.id) == (one.tag, one.id))
                .count()
                > 1
        });
        let base = [Tag::Owner, Tag::OwningGroup, Tag::Other]
            .iter()
            .all(|tag| count(*tag) == 1);
        base && !twice
            && count(Tag::Mask) <= 1
            && (named.is_empty() || count(Tag::Mask) == 1)
            && named.iter().all(|ace| ace.id != u32::MAX)
    };
    let fits = |bit, list: &List| lists.mask & bit == 0 || list.entries.is_empty() || is_list(&list.entries);
    lists.mask < 16 && fits(1, &lists.access) && fits(4, &lists.default)
}

#[test]
fn a_tree_in_memory_permits_what_the_kernel_permits() {
    let test = "a_tree_in_memory_permits_what_the_kernel_permits";
    let Some((_folder, servers)) = both(test, true) else {
        return;
    };
    let mode = || 0..0o1000_u32;
    let number = std::cell::Cell::new(0);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(
            &(entries(), entries(), [mode(), mode(), mode()]),
            |(own, default, modes)| {
                number.set(number.get() + 1);
                let seen = servers
                    .each_ref()
                    .map(|server| carried_out(server, &number.get().to_string(), (&own, &default), modes));
                prop_assert_eq!(&seen[0], &seen[1]);
                Ok(())
            },
        )
        .unwrap();
}

const PLAIN: [Ace; 3] = [
    Ace {
        tag: Tag::Owner,
        id: 0,
        rights: 6,
    },
    Ace {
        tag: Tag::OwningGroup,
        id: 0,
        rights: 4,
    },
    Ace {
        tag: Tag::Other,
        id: 0,
        rights: 0,
    },
];

/// A list with a mask and this number of named users.
fn long(users: u32) -> Vec<Ace> {
    let named = (0..users).map(|n| ace(Tag::User, 10_000 + n, n % 8));
    PLAIN
        .into_iter()
        .chain(named)
        .chain([ace(Tag::Mask, 0, 7)])
        .collect()
}

#[test]
fn long_lists_are_returned_complete() {
    let Some((_folder, servers)) = both("long_lists_are_returned_complete", false) else {
        return;
    };
    for (server, users) in servers.iter().zip([400, MAX_ENTRIES as u32 - 4]) {
        let mut client = client(server, false);
        let root = client.mount(b"/").unwrap();
        let file = create(&mut client, root, b"file", 0o600).unwrap();
        client.set_acls(file, access(&long(users))).unwrap();
        let got = client.acls(file, ACCESS).unwrap();
        assert_eq!(got.access.entries.len(), users as usize + 4);
        let named = |entries: &[Ace]| {
            let named = entries.iter().filter(|entry| entry.tag == Tag::User);
            named.copied().collect::<Vec<_>>()
        };
        assert_eq!(named(&got.access.entries), named(&long(users)));
        let count = client.acls(file, ACCESS_COUNT).unwrap();
        assert_eq!((count.access.count, count.access.entries), (users + 4, vec![]));
    }
}

#[test]
fn a_list_equal_to_a_mode_has_four_entries_with_owners() {
    let Some((_folder, servers)) = both("a_list_that_says_no_more_than_a_mode", false) else {
        return;
    };
    for server in servers {
        let mut client = client(&server, true);
        let root = client.mount(b"/").unwrap();
        let file = create(&mut client, root, b"file", 0o641).unwrap();
        let is = client.attributes(file).unwrap();
        let got = client.acls(file, ACCESS | DEFAULT).unwrap();
        let expected = [
            ace(Tag::Owner, is.uid, 6),
            ace(Tag::OwningGroup, is.gid, 4),
            ace(Tag::Mask, 0, 4),
            ace(Tag::Other, 0, 1),
        ];
        assert_eq!((got.access, got.default), (list(&expected), List::default()));
        // A list from the server can be set again.
        client.set_acls(file, access(&expected)).unwrap();
        assert_eq!(client.attributes(file).unwrap().mode, 0o641);
        chmod(&mut client, file, 0o660);
        assert_eq!(client.acls(file, ACCESS).unwrap().access.entries[1].rights, 6);
    }
}

/// The status that a server returns for SETACL (or another procedure) of a file. `words` follow the
/// handle.
fn answered(server: &Arc<Server>, procedure: u32, file: Handle, words: &[u32]) -> Result<Status, Refusal> {
    let call = Call {
        xid: procedure ^ words.len() as u32,
        program: nfsacl::PROGRAM,
        version: nfsacl::VERSION,
        procedure,
        credential: Credential::Anonymous,
    };
    let mut message = call.emit();
    file.put(&mut message);
    words.iter().for_each(|word| word.put(&mut message));
    let request = Request {
        peer: PEER,
        message: &message,
        item: None,
        back: None,
    };
    let reply = server.call(request).unwrap().message;
    match results(&reply) {
        Ok(mut results) => Ok(Status::take(&mut results).unwrap()),
        Err(NoResults::Refused(refusal)) => Err(refusal),
        other => panic!("{other:?}"),
    }
}

#[test]
fn bad_lists_are_garbage_or_invalid() {
    let server = of_memory(1 << 20, OPEN);
    let root = client(&server, true).mount(b"/").unwrap();
    const GARBAGE: Result<Status, Refusal> = Err(Refusal::Garbage);
    const INVALID: Result<Status, Refusal> = Ok(Status::Invalid);
    let plain = [4, 4, 1, 0, 7, 4, 0, 5, 0x10, 0, 7, 0x20, 0, 5];
    let changed = |at: usize, word: u32| {
        let mut list = plain;
        list[at] = word;
        [&[1], &list[..], &[0, 0]].concat()
    };
    for (words, expected) in [
        // Truncated arguments, missing entries, inconsistent counts, and too many entries.
        (vec![], GARBAGE),
        (vec![1], GARBAGE),
        ([&[1], &plain[..]].concat(), GARBAGE),
        (changed(1, 5), GARBAGE),
        (changed(0, 5), GARBAGE),
        (changed(0, 1025), GARBAGE),
        (vec![0, 0, 1025], GARBAGE),
        (vec![0, 0, u32::MAX], GARBAGE),
        // Unknown tags and permissions.
        (changed(2, 3), GARBAGE),
        (changed(2, 0x1_0001), GARBAGE),
        (changed(4, 8), GARBAGE),
        // An unknown bit of the mask, and an entry that is present twice.
        (vec![0x10, 0, 0, 0, 0], INVALID),
        (changed(2, 4), INVALID),
    ] {
        assert_eq!(answered(&server, 2, root, &words), expected, "{words:?}");
    }
    // The further bits of Solaris in a mask are ignored.
    let owner_only = Ok(Status::Perm);
    assert_eq!(answered(&server, 2, root, &changed(10, 0xff)), owner_only);
    assert_eq!(answered(&server, 1, root, &[0x10]), INVALID);
    assert_eq!(answered(&server, 1, root, &[]), GARBAGE);
    assert_eq!(answered(&server, 3, root, &[]), Err(Refusal::NoProcedure));
    let foreign = Handle::new(b"foreign.");
    assert_eq!(answered(&server, 1, foreign, &[1]), Ok(Status::BadHandle));
}

#[test]
fn lists_are_changed_by_owners_and_never_when_read_only() {
    let Some((folder, servers)) = both("lists_are_their_owners_to_change", false) else {
        return;
    };
    for server in servers {
        let mut owner = client(&server, true);
        let root = owner.mount(b"/").unwrap();
        let file = create(&mut owner, root, b"file", 0o600).unwrap();
        owner.set_acls(file, access(&long(1))).unwrap();
        // Only a server that runs as root acts for other users.
        if rustix::process::geteuid().is_root() {
            let mut other = client_as(&server, 1001);
            assert_eq!(status(other.set_acls(file, access(&PLAIN))), Status::Perm);
        }
        let default = Lists {
            mask: DEFAULT,
            access: List::default(),
            default: list(&PLAIN),
        };
        assert_eq!(
            status(owner.set_acls(file, default)),
            Status::Access,
            "no directory"
        );
    }
    let read_only = Options {
        read_only: true,
        ..OPEN
    };
    let mut client = client(&of_directory(folder.path(), read_only), true);
    let root = client.mount(b"/").unwrap();
    let file = client.lookup(root, b"file").unwrap().file;
    assert_eq!(status(client.set_acls(file, access(&PLAIN))), Status::ReadOnly);
    assert_eq!(client.acls(file, ACCESS).unwrap().access.count, 5);
}

/// Setting an empty default list removes it. A call without the default list keeps it.
#[test]
fn a_default_list_is_set_inherited_and_removed() {
    let Some((_folder, servers)) = both("a_default_list_is_set_inherited_and_removed", false) else {
        return;
    };
    for server in servers {
        let mut client = client(&server, true);
        let root = client.mount(b"/").unwrap();
        let dir = mkdir(&mut client, root, b"dir").unwrap();
        let default = |entries: &[Ace]| Lists {
            mask: DEFAULT,
            access: List::default(),
            default: list(entries),
        };
        let count = |client: &mut Client| client.acls(dir, DEFAULT_COUNT).unwrap().default.count;
        client.set_acls(dir, default(&long(2))).unwrap();
        client.set_acls(dir, access(&long(3))).unwrap();
        assert_eq!(count(&mut client), 6);
        for _ in 0..2 {
            client.set_acls(dir, default(&[])).unwrap();
            assert_eq!(count(&mut client), 0);
        }
        assert_eq!(client.acls(dir, ACCESS_COUNT).unwrap().access.count, 7);
    }
}

/// Linux sends such a list when it makes a directory below one whose default list has no named
/// entries.
#[test]
fn an_access_list_without_entries_equals_the_mode() {
    let Some((_folder, servers)) = both("an_access_list_without_entries_equals_the_mode", false) else {
        return;
    };
    for server in servers {
        let mut client = client(&server, true);
        let root = client.mount(b"/").unwrap();
        let dir = mkdir(&mut client, root, b"dir").unwrap();
        client.set_acls(dir, access(&long(3))).unwrap();
        let mode = client.attributes(dir).unwrap().mode;
        let lists = Lists {
            mask: ACCESS | DEFAULT,
            access: List::default(),
            default: list(&PLAIN),
        };
        client.set_acls(dir, lists).unwrap();
        let got = client.acls(dir, ACCESS | DEFAULT).unwrap();
        assert_eq!((got.access.count, got.default.count), (4, 4));
        assert_eq!(client.attributes(dir).unwrap().mode, mode);
    }
}

#[test]
fn the_transport_makes_room_for_the_longest_lists() {
    use urnic_nfs::binding::NfsAcl3;
    use urnic_rpc_rdma::binding::Binding;
    let room = NfsAcl3.max_results(1, &[]);
    assert_eq!(room, Some(urnic_nfs::nfsacl::MAX_RESULTS));
}

#[test]
fn a_file_system_without_lists_reports_it() {
    let server = of_directory(Path::new("/proc"), OPEN);
    let mut client = client(&server, true);
    let root = client.mount(b"/").unwrap();
    assert_eq!(status(client.acls(root, ACCESS)), Status::NotSupported);
    assert_eq!(
        status(client.set_acls(root, access(&long(1)))),
        Status::NotSupported
    );
}

#[test]
fn lists_count_for_the_room_that_a_tree_in_memory_has() {
    let server = of_memory(64 << 10, OPEN);
    let mut client = client(&server, true);
    let root = client.mount(b"/").unwrap();
    let file = |n: u32| format!("file-{n}");
    let fill = |client: &mut Client| {
        let full = (0..).find_map(|n| {
            let file = create(client, root, file(n).as_bytes(), 0o600).unwrap();
            client
                .set_acls(file, access(&long(1000)))
                .err()
                .map(|error| (n, error))
        });
        let (n, error) = full.unwrap();
        assert!(matches!(error, Error::Nfs(Status::NoSpace)), "{error}");
        n
    };
    let first = fill(&mut client);
    assert!((1..10).contains(&first), "{first} files");
    for n in 0..=first {
        remove(&mut client, root, file(n).as_bytes()).unwrap();
    }
    assert_eq!(fill(&mut client), first, "removed files free their space");
}

#[test]
fn a_list_that_is_too_long_for_clients_is_not_cut() {
    let entries = long(MAX_ENTRIES as u32);
    let acls = Acls {
        access: Acl::new(&entries).unwrap(),
        default: None,
    };
    assert_eq!(Lists::of(&acls, ACCESS, 0, 0), Err(Status::FileTooBig));
    assert_eq!(
        Lists::of(&acls, DEFAULT, 0, 0).map(|lists| lists.access.count),
        Ok(0)
    );
}
