//! The semantics that clients rely on, tested with every tree.

use super::*;
use std::collections::BTreeSet;
use std::io::Write as _;

/// A tree of a directory and a tree in memory, with the folder of the first.
fn both(options: Options) -> (tempfile::TempDir, [Arc<Server>; 2]) {
    let folder = tempfile::tempdir().expect("a folder");
    let servers = [of_directory(folder.path(), options), of_memory(64 << 20, options)];
    (folder, servers)
}

#[test]
fn a_large_directory_is_listed_once_each_while_it_changes() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut client = client(&server, true);
        let root = client.mount(b"/").unwrap();
        for n in 0..3000 {
            create(&mut client, root, format!("file-{n}").as_bytes(), 0o644).unwrap();
        }
        let mut seen = Vec::new();
        let mut cookie = 0;
        for round in 0.. {
            let arguments = ReaddirArgs {
                dir: root,
                cookie,
                verifier: [0; 8],
                count: 8192,
            };
            // The call is made by hand, because entries have no fixed form.
            let mut message = call(Procedure::Readdir, round);
            urnic_nfs::xdr::Xdr::put(&arguments, &mut message);
            let reply = answer(&server, &message);
            let mut results = urnic_nfs::rpc::results(&reply).unwrap();
            use urnic_nfs::xdr::Xdr;
            Reply::<ReaddirOk, Option<Attributes>>::take(&mut results)
                .unwrap()
                .unwrap();
            assert!(reply.len() <= 8192 + 64, "{} bytes", reply.len());
            while let Some(entry) = <Option<Listed> as Xdr>::take(&mut results).unwrap() {
                seen.push(entry.name.to_vec());
                cookie = entry.cookie;
            }
            if bool::take(&mut results).unwrap() {
                break;
            }
            // Files that were already listed are removed, and new files are made.
            for name in seen.iter().rev().take(3).filter(|name| name.starts_with(b"file")) {
                let _ = remove(&mut client, root, name);
            }
            create(&mut client, root, format!("new-{round}").as_bytes(), 0o644).unwrap();
        }
        let old: BTreeSet<_> = seen.iter().filter(|name| name.starts_with(b"file-")).collect();
        assert_eq!(old.len(), 3000, "each is listed");
        assert_eq!(
            seen.iter().collect::<BTreeSet<_>>().len(),
            seen.len(),
            "none is listed twice"
        );
        assert!(seen.iter().any(|name| name == b".") && seen.iter().any(|name| name == b".."));
    }
}

fn call(procedure: Procedure, xid: u32) -> Vec<u8> {
    let Caller { uid, gid, groups } = me();
    let credential = Credential::System { uid, gid, groups };
    urnic_nfs::rpc::Call {
        xid,
        program: PROGRAM,
        version: VERSION,
        procedure: procedure as u32,
        credential,
    }
    .emit()
}

fn answer(server: &Arc<Server>, message: &[u8]) -> Vec<u8> {
    let request = Request {
        peer: PEER,
        message,
        item: None,
        back: None,
    };
    server.call(request).expect("an answer").message
}

#[test]
fn a_repeated_call_is_not_executed_again() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut client = client(&server, true);
        let dir = client.mount(b"/").unwrap();
        create(&mut client, dir, b"once", 0o644).unwrap();
        let again = |xid| {
            let mut message = call(Procedure::Remove, xid);
            urnic_nfs::xdr::Xdr::put(&Entry { dir, name: b"once" }, &mut message);
            answer(&server, &message)
        };
        let first = again(4711);
        assert!(urnic_nfs::rpc::results(&first).unwrap().0.starts_with(&[0; 4]));
        assert_eq!(again(4711), first);
        assert_ne!(again(4712)[4..], first[4..], "another call finds it removed");
    }
}

#[test]
fn a_delayed_write_does_not_undo_a_later_one() {
    let (_folder, servers) = both(OPEN);
    for (server, apart) in servers.iter().zip([false, true]) {
        let mut client = client(server, true);
        let dir = client.mount(b"/").unwrap();
        let file = create(&mut client, dir, b"written", 0o644).unwrap();
        let write = |xid, byte| {
            let mut message = call(Procedure::Write, xid);
            let arguments = WriteArgs {
                file,
                offset: 0,
                count: 5000,
                stable: Stable::Unstable,
                len: 5000,
            };
            urnic_nfs::xdr::Xdr::put(&arguments, &mut message);
            let mut item = None;
            if apart {
                let mut data = Pool::new().take(5000).expect("memory");
                data.fill(byte);
                item = Some(data.share());
            } else {
                message.extend([byte; 5000]);
            }
            let (peer, message) = (PEER, &message[..]);
            let request = Request {
                peer,
                message,
                item,
                back: None,
            };
            server.call(request).expect("an answer").message
        };
        let first = write(4711, b'a');
        write(4712, b'b');
        assert_eq!(write(4711, b'a'), first);
        assert_eq!(contents(&mut client, file, 0, 5000).unwrap().0, [b'b'; 5000]);
        // Another call differs in its xid or in its bytes.
        write(4712, b'c');
        assert_eq!(contents(&mut client, file, 0, 5000).unwrap().0, [b'c'; 5000]);
    }
}

#[test]
fn exclusive_create_succeeds_again_for_its_own_verifier_only() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut client = client(&server, true);
        let dir = client.mount(b"/").unwrap();
        let mut exclusive = |verifier| {
            let place = Entry { dir, name: b"new" };
            let how = CreateHow::Exclusive(verifier);
            client.nfs::<Created, Wcc>(Procedure::Create, &CreateArgs { place, how })
        };
        let made = exclusive(*b"verifier").unwrap();
        assert_eq!(exclusive(*b"verifier").unwrap().file, made.file);
        assert_eq!(status(exclusive(*b"another!")), Status::Exist);
    }
}

#[test]
fn a_removed_file_is_stale_and_a_foreign_handle_is_refused() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut client = client(&server, true);
        let root = client.mount(b"/").unwrap();
        let file = create(&mut client, root, b"a", 0o644).unwrap();
        write(&mut client, file, 0, b"bytes.").unwrap();
        remove(&mut client, root, b"a").unwrap();
        assert_eq!(status(client.attributes(file)), Status::Stale);
        assert_eq!(status(contents(&mut client, file, 0, 10)), Status::Stale);
        assert_eq!(status(write(&mut client, file, 0, b"more")), Status::Stale);
        for bytes in [&b""[..], b"x", &[7; 64], &[0; 25], &[0; 16]] {
            let refused = status(client.attributes(Handle::new(bytes)));
            assert!(
                matches!(refused, Status::BadHandle | Status::Stale),
                "{refused:?}"
            );
        }
    }
}

#[test]
fn names_cannot_leave_the_tree() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut client = client(&server, true);
        let root = client.mount(b"/").unwrap();
        assert_eq!(client.lookup(root, b"..").unwrap().file, root);
        assert_eq!(client.lookup(root, b".").unwrap().file, root);
        for name in [&b"../etc"[..], b"/etc", b"a/b", b"a\0b", b""] {
            assert_eq!(status(client.lookup(root, name)), Status::Invalid, "{name:?}");
            assert_eq!(status(create(&mut client, root, name, 0o644)), Status::Invalid);
        }
        assert_eq!(status(create(&mut client, root, b"..", 0o644)), Status::Invalid);
        assert_eq!(status(client.lookup(root, &[b'x'; 256])), Status::NameTooLong);
        let place = Entry {
            dir: root,
            name: b"out",
        };
        let link = client.symlink(place, b"/").unwrap().file.unwrap();
        assert_eq!(status(client.lookup(link, b"etc")), Status::NotDir);
        assert!(client.mount(b"/out").is_err());
        assert!(client.mount(b"/../..").is_err());
        let sub = mkdir(&mut client, root, b"sub").unwrap();
        assert_eq!(client.lookup(sub, b"..").unwrap().file, root);
        assert_eq!(client.mount(b"/sub").unwrap(), sub);
    }
}

#[test]
fn a_read_only_server_changes_nothing() {
    let options = Options {
        read_only: true,
        ..OPEN
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a"), "text").unwrap();
    let mut client = client(&of_directory(folder.path(), options), true);
    let root = client.mount(b"/").unwrap();
    let file = client.lookup(root, b"a").unwrap().file;
    assert_eq!(
        contents(&mut client, file, 0, 100).unwrap(),
        (b"text".to_vec(), true)
    );
    assert_eq!(status(write(&mut client, file, 0, b"x")), Status::ReadOnly);
    assert_eq!(status(remove(&mut client, root, b"a")), Status::ReadOnly);
    assert_eq!(status(create(&mut client, root, b"b", 0o644)), Status::ReadOnly);
    let access = AccessArgs { file, access: 0x3f };
    let access = client
        .nfs::<AccessOk, Option<Attributes>>(Procedure::Access, &access)
        .unwrap()
        .access;
    assert_eq!(access & 0b1_1101, 1, "reading is all there is");
    assert_eq!(std::fs::read(folder.path().join("a")).unwrap(), b"text");
}

#[test]
fn a_full_tree_reports_it_and_reuses_freed_space() {
    let server = of_memory(1 << 20, OPEN);
    let mut client = client(&server, true);
    let root = client.mount(b"/").unwrap();
    let free = |client: &mut Client| {
        client
            .nfs::<FsstatOk, Option<Attributes>>(Procedure::Fsstat, &root)
            .unwrap()
            .statistics
            .free_bytes
    };
    let before = free(&mut client);
    let mut files = 0;
    let full = loop {
        let name = format!("{files}");
        files += 1;
        let made = create(&mut client, root, name.as_bytes(), 0o644);
        match made.and_then(|file| write(&mut client, file, 0, &[1; 100_000])) {
            Ok(written) => assert_eq!(written, 100_000),
            Err(error) => break status(Err::<(), _>(error)),
        }
    };
    assert_eq!(full, Status::NoSpace);
    assert!(
        (5..=11).contains(&files),
        "{files} files of 100,000 bytes in a MiB"
    );
    for n in 0..files {
        let _ = remove(&mut client, root, format!("{n}").as_bytes());
    }
    assert_eq!(free(&mut client), before);
}

/// Only root can test a directory with files of several users. A tree in memory can always have
/// them.
#[test]
fn users_have_their_own_rights_in_memory() {
    rights(&of_memory(1 << 20, OPEN));
}

#[test]
fn users_have_their_own_rights_in_a_directory() {
    if !rustix::process::geteuid().is_root() {
        // The message bypasses the test runner's capture.
        let notice =
            "SKIPPED users_have_their_own_rights_in_a_directory: only root can act for other users\n";
        let _ = std::io::stderr().write_all(notice.as_bytes());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    rights(&of_directory(folder.path(), OPEN));
}

fn rights(server: &Arc<Server>) {
    let mut root_user = client_as(server, 0);
    let root = root_user.mount(b"/").expect("allowed");
    let attributes = SetAttributes {
        mode: Some(0o1777),
        ..SetAttributes::default()
    };
    let guard = None;
    let open = SetattrArgs {
        file: root,
        attributes,
        guard,
    };
    root_user
        .nfs::<Wcc, Wcc>(Procedure::Setattr, &open)
        .expect("allowed");
    let (mut ann, mut bob) = (client_as(server, 1001), client_as(server, 1002));
    let secret = create(&mut ann, root, b"secret", 0o600).expect("allowed");
    let file = secret;
    write(&mut ann, file, 0, b"hers").expect("allowed");
    let is = ann.attributes(file).expect("allowed");
    assert_eq!((is.uid, is.gid, is.mode), (1001, 1001, 0o600));
    assert_eq!(status(contents(&mut bob, file, 0, 10)), Status::Access);
    assert_eq!(status(write(&mut bob, file, 0, b"his")), Status::Access);
    let kept = status(remove(&mut bob, root, b"secret"));
    assert!(matches!(kept, Status::Access | Status::Perm), "sticky: {kept:?}");
    let all = AccessArgs { file, access: 0x3f };
    assert_eq!(
        bob.nfs::<AccessOk, Option<Attributes>>(Procedure::Access, &all)
            .expect("allowed")
            .access,
        0
    );
    let hers = ann
        .nfs::<AccessOk, Option<Attributes>>(Procedure::Access, &all)
        .expect("allowed")
        .access;
    assert_eq!(hers, 0b1101);
    // A file that was created as read-only is written by its owner.
    let file = create(&mut ann, root, b"read-only", 0o444).expect("allowed");
    assert_eq!(write(&mut ann, file, 0, b"hers").expect("allowed"), 4);
    assert_eq!(contents(&mut bob, file, 0, 10).expect("allowed").0, b"hers");
    // 2³² − 1 is no valid id. The kernel rejects it for a thread, which would keep the permissions
    // of root.
    assert_eq!(
        status(contents(&mut client_as(server, u32::MAX), secret, 0, 10)),
        Status::Access
    );
}

#[test]
fn a_handle_outlives_one_of_two_names() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut client = client(&server, true);
        let dir = client.mount(b"/").unwrap();
        for round in 0..3 {
            let file = create(&mut client, dir, b"temporary", 0o644).unwrap();
            let lasting = format!("lasting-{round}");
            let place = Entry {
                dir,
                name: lasting.as_bytes(),
            };
            client
                .nfs::<(Option<Attributes>, Wcc), (Option<Attributes>, Wcc)>(
                    Procedure::Link,
                    &LinkArgs { file, place },
                )
                .unwrap();
            remove(&mut client, dir, b"temporary").unwrap();
            assert_eq!(client.attributes(file).unwrap().links, 1);
            assert_eq!(write(&mut client, file, 0, b"more").unwrap(), 4);
        }
    }
}

#[test]
fn directories_inherit_the_group_and_its_set_id_bit() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut client = client(&server, true);
        let root = client.mount(b"/").unwrap();
        let mut dir = root;
        for (name, mode) in [(&b"above"[..], 0o2775), (b"below", 0o755)] {
            let arguments = MkdirArgs {
                place: Entry { dir, name },
                attributes: SetAttributes {
                    mode: Some(mode),
                    ..SetAttributes::default()
                },
            };
            let made = client.nfs::<Created, Wcc>(Procedure::Mkdir, &arguments).unwrap();
            assert_eq!(made.attributes.unwrap().mode, mode | 0o2000);
            dir = made.file.unwrap();
        }
    }
}

#[test]
fn writes_remove_the_set_id_bits() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut ann = client_as(&server, own_or(1001));
        let mut owner = client(&server, true);
        let dir = owner.mount(b"/").unwrap();
        let file = create(&mut owner, dir, b"program", 0o6777).unwrap();
        let mode = |client: &mut Client| client.attributes(file).unwrap().mode;
        assert_eq!(mode(&mut owner), 0o6777);
        assert_eq!(write(&mut ann, file, 0, b"\x7fELF").unwrap(), 4);
        assert_eq!(mode(&mut owner), 0o777);
    }
}

/// The id of the process, or `uid` if the process runs as root. Other processes cannot act for
/// other users.
fn own_or(uid: u32) -> u32 {
    let own = rustix::process::geteuid();
    if own.is_root() { uid } else { own.as_raw() }
}

#[test]
fn root_is_mapped_to_nobody_unless_trusted() {
    let server = of_memory(1 << 20, Options::default());
    let mut root_user = client_as(&server, 0);
    let root = root_user.mount(b"/").unwrap();
    assert_eq!(status(create(&mut root_user, root, b"a", 0o644)), Status::Access);
}

#[test]
fn special_files_have_their_kind() {
    let (_folder, servers) = both(OPEN);
    for server in servers {
        let mut client = client(&server, true);
        let dir = client.mount(b"/").unwrap();
        for (name, kind) in [(&b"fifo"[..], Kind::Fifo), (b"socket", Kind::Socket)] {
            let place = Entry { dir, name };
            let what = Special::Pipe(kind, SetAttributes::default());
            let made = client
                .nfs::<Created, Wcc>(Procedure::Mknod, &MknodArgs { place, what })
                .unwrap();
            assert_eq!(made.attributes.unwrap().kind, kind);
            assert_eq!(
                status(contents(&mut client, made.file.unwrap(), 0, 1)),
                Status::Invalid
            );
        }
        let place = Entry { dir, name: b"file" };
        let what = Special::Other(Kind::File);
        let refused = client.nfs::<Created, Wcc>(Procedure::Mknod, &MknodArgs { place, what });
        assert_eq!(status(refused), Status::BadType);
    }
}

#[test]
fn messages_that_are_no_calls_are_answered_by_rpc_rules() {
    let server = of_memory(1 << 20, OPEN);
    let words = |words: &[u32]| {
        words
            .iter()
            .flat_map(|word| word.to_be_bytes())
            .collect::<Vec<u8>>()
    };
    // RPC version 3: MSG_DENIED, RPC_MISMATCH, 2 to 2.
    let reply = answer(&server, &words(&[9, 0, 3, PROGRAM, 3, 0, 0, 0, 0, 0]));
    assert_eq!(reply, words(&[9, 1, 1, 0, 2, 2]));
    // An unknown credential: AUTH_ERROR, AUTH_BADCRED.
    let reply = answer(&server, &words(&[9, 0, 2, PROGRAM, 3, 0, 77, 0, 0, 0]));
    assert_eq!(reply, words(&[9, 1, 1, 1, 1]));
    // NFS version 4: PROG_MISMATCH, 3 to 3. Another program: PROG_UNAVAIL. Another procedure:
    // PROC_UNAVAIL. No arguments: GARBAGE_ARGS.
    for (program, version, procedure, end) in [
        (PROGRAM, 4, 0, &[2, 3, 3][..]),
        (42, 1, 0, &[1]),
        (PROGRAM, 3, 99, &[3]),
        (PROGRAM, 3, 1, &[4]),
    ] {
        let reply = answer(
            &server,
            &words(&[9, 0, 2, program, version, procedure, 0, 0, 0, 0]),
        );
        assert_eq!(reply, words(&[&[9, 1, 0, 0, 0], end].concat()));
    }
    let request = Request {
        peer: PEER,
        message: &words(&[9, 1, 0, 0]),
        item: None,
        back: None,
    };
    assert!(server.call(request).is_none(), "a reply is no call");
}

/// A server without RPCSEC_GSS denies the credential before it reads the arguments: of the calls
/// that set up and end a context, and of data with each service (RFC 2203 §5).
#[test]
fn rpc_g_03_rpcsec_gss_is_denied_with_auth_badcred() {
    const RPCSEC_GSS: u32 = 6;
    let server = of_memory(1 << 20, OPEN);
    // Data, INIT, CONTINUE_INIT, DESTROY; none, integrity, privacy.
    for (control, service) in [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1), (3, 1)] {
        for procedure in [0, 1] {
            let words = [
                9, 0, 2, PROGRAM, 3, procedure, RPCSEC_GSS, 20, 1, control, 1, service, 0,
            ];
            let verifier = [RPCSEC_GSS, 4, 0x0102_0304];
            let call: Vec<u8> = words
                .into_iter()
                .chain(verifier)
                .flat_map(u32::to_be_bytes)
                .collect();
            let denied: Vec<u8> = [9, 1, 1, 1, 1].into_iter().flat_map(u32::to_be_bytes).collect();
            assert_eq!(answer(&server, &call), denied, "{control}, {service}");
        }
    }
}
