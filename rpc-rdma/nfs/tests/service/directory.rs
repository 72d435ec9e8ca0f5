//! Tests of a directory of this machine that other programs change at the same time.

use super::*;
use std::fs;

#[test]
fn handles_outlive_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let server = of_directory(folder.path(), OPEN);
    let mut before = client(&server, true);
    let root = before.mount(b"/").unwrap();
    let mut dir = root;
    for name in [b"one", b"two", b"six"] {
        dir = mkdir(&mut before, dir, name).unwrap();
    }
    let file = create(&mut before, dir, b"file", 0o644).unwrap();
    write(&mut before, file, 0, b"still there").unwrap();
    drop((before, server));

    let mut after = client(&of_directory(folder.path(), OPEN), true);
    assert_eq!(contents(&mut after, file, 0, 100).unwrap().0, b"still there");
    assert_eq!(after.lookup(dir, b"file").unwrap().file, file);
    assert_eq!(after.mount(b"/").unwrap(), root);
    // Another program moves the directory above.
    drop(after);
    fs::rename(folder.path().join("one/two"), folder.path().join("elsewhere")).unwrap();
    let mut after = client(&of_directory(folder.path(), OPEN), true);
    assert_eq!(contents(&mut after, file, 0, 100).unwrap().0, b"still there");
    // Another program removes the file.
    drop(after);
    fs::remove_file(folder.path().join("elsewhere/six/file")).unwrap();
    let mut after = client(&of_directory(folder.path(), OPEN), true);
    assert_eq!(status(after.attributes(file)), Status::Stale);
}

/// The status that a client gets when it retries after `Jukebox`.
fn in_the_end<T: std::fmt::Debug>(mut ask: impl FnMut() -> Result<T, Error>) -> Status {
    loop {
        match status(ask()) {
            Status::Jukebox => std::thread::sleep(std::time::Duration::from_millis(10)),
            other => return other,
        }
    }
}

#[test]
fn the_write_verifier_changes_with_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let verifier = || {
        let mut client = client(&of_directory(folder.path(), OPEN), true);
        let root = client.mount(b"/").unwrap();
        let _there = create(&mut client, root, b"a", 0o644);
        let file = client.lookup(root, b"a").unwrap().file;
        let data = client.memory(1).unwrap().share();
        client.begin_write(file, 0, data, Stable::Unstable).unwrap();
        let wrote = written(&client.wait().unwrap().1).unwrap();
        let commit = CommitArgs {
            file,
            offset: 0,
            count: 0,
        };
        let committed = client.nfs::<CommitOk, Wcc>(Procedure::Commit, &commit).unwrap();
        assert_eq!(committed.verifier, wrote.verifier);
        wrote.verifier
    };
    assert_ne!(verifier(), verifier());
}

#[test]
fn a_handle_is_valid_in_one_tree_only() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(one.path().join("a"), "").unwrap();
    let mut first = client(&of_directory(one.path(), OPEN), true);
    let root = first.mount(b"/").unwrap();
    let file = first.lookup(root, b"a").unwrap().file;
    let mut second = client(&of_directory(two.path(), OPEN), true);
    assert_eq!(status(second.attributes(file)), Status::Stale);
}

#[test]
fn a_directory_replaced_by_a_link_is_not_followed() {
    let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(outside.path().join("secret"), "secret").unwrap();
    let mut client = client(&of_directory(folder.path(), OPEN), true);
    let root = client.mount(b"/").unwrap();
    let dir = mkdir(&mut client, root, b"dir").unwrap();
    let below = mkdir(&mut client, dir, b"below").unwrap();
    // The directory moves out of the tree, and a link takes its place.
    fs::rename(folder.path().join("dir"), outside.path().join("dir")).unwrap();
    std::os::unix::fs::symlink(outside.path(), folder.path().join("dir")).unwrap();
    let mut fresh = super::client(&of_directory(folder.path(), OPEN), true);
    for handle in [dir, below] {
        assert_eq!(in_the_end(|| fresh.attributes(handle)), Status::Stale);
        assert_eq!(in_the_end(|| fresh.lookup(handle, b"secret")), Status::Stale);
    }
    let link = fresh.lookup(root, b"dir").unwrap();
    assert_eq!(link.attributes.unwrap().kind, Kind::Symlink);
    assert_eq!(status(fresh.lookup(link.file, b"secret")), Status::NotDir);
}

#[test]
fn holes_stay_holes() {
    let folder = tempfile::tempdir().unwrap();
    let mut client = client(&of_directory(folder.path(), OPEN), true);
    let root = client.mount(b"/").unwrap();
    let file = create(&mut client, root, b"sparse", 0o644).unwrap();
    write(&mut client, file, 1 << 30, b"end").unwrap();
    let is = client.attributes(file).unwrap();
    assert_eq!(is.size, (1 << 30) + 3);
    assert!(is.used < 1 << 20, "{} bytes of storage", is.used);
    assert_eq!(
        contents(&mut client, file, 5, 100).unwrap(),
        (vec![0; 100], false)
    );
}
