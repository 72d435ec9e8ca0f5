//! Random operations on both kinds of tree. The kernel's file system is the reference.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Operation {
    Create(u8, u8),
    Mkdir(u8, u8),
    Symlink(u8, u8),
    Remove(u8, u8),
    Rmdir(u8, u8),
    Rename(u8, u8, u8, u8),
    Link(u8, u8, u8, u8),
    Write(u8, u8, u32, u32, u8),
    Resize(u8, u8, u32),
    Read(u8, u8, u32, u32),
    List(u8),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    use Operation::*;
    let (dir, name) = (|| 0..3_u8, || 0..4_u8);
    let (at, len) = (
        || 0..300_000_u32,
        || prop_oneof![0..5000_u32, 60_000..200_000_u32],
    );
    let one = prop_oneof![
        4 => (dir(), name()).prop_map(|(d, n)| Create(d, n)),
        2 => (dir(), name()).prop_map(|(d, n)| Mkdir(d, n)),
        1 => (dir(), name()).prop_map(|(d, n)| Symlink(d, n)),
        2 => (dir(), name()).prop_map(|(d, n)| Remove(d, n)),
        1 => (dir(), name()).prop_map(|(d, n)| Rmdir(d, n)),
        3 => (dir(), name(), dir(), name()).prop_map(|(d, n, e, m)| Rename(d, n, e, m)),
        2 => (dir(), name(), dir(), name()).prop_map(|(d, n, e, m)| Link(d, n, e, m)),
        8 => (dir(), name(), at(), len(), any::<u8>()).prop_map(|(d, n, a, l, o)| Write(d, n, a, l, o)),
        2 => (dir(), name(), at()).prop_map(|(d, n, s)| Resize(d, n, s)),
        8 => (dir(), name(), at(), len()).prop_map(|(d, n, a, l)| Read(d, n, a, l)),
        2 => dir().prop_map(List),
    ];
    proptest::collection::vec(one, 1..60)
}

const NAMES: [&[u8]; 4] = [b"a", b"b", b"dir", b"other"];

/// The observable result of one operation, without times and numbers.
fn carry_out(client: &mut Client, root: Handle, operation: &Operation) -> Result<String, Error> {
    let mut dir = |which: &u8| match which {
        0 => Ok(root),
        n => Ok::<_, Error>(client.lookup(root, NAMES[usize::from(*n) + 1])?.file),
    };
    let name = |which: &u8| NAMES[usize::from(*which)];
    use Operation::*;
    Ok(match operation {
        Create(d, n) => {
            let d = dir(d)?;
            create(client, d, name(n), 0o644).map(|_| String::new())?
        }
        Mkdir(d, n) => {
            let d = dir(d)?;
            mkdir(client, d, name(n)).map(|_| String::new())?
        }
        Symlink(d, n) => {
            let place = Entry {
                dir: dir(d)?,
                name: name(n),
            };
            let made = client.symlink(place, b"../a/./b")?;
            format!("{:?}", client.read_link(made.file.expect("a handle"))?)
        }
        Remove(d, n) => {
            let d = dir(d)?;
            remove(client, d, name(n)).map(|()| String::new())?
        }
        Rmdir(d, n) => {
            let place = Entry {
                dir: dir(d)?,
                name: name(n),
            };
            client
                .nfs::<Wcc, Wcc>(Procedure::Rmdir, &place)
                .map(|_| String::new())?
        }
        Rename(d, n, e, m) => {
            let from = Entry {
                dir: dir(d)?,
                name: name(n),
            };
            let to = Entry {
                dir: dir(e)?,
                name: name(m),
            };
            let done = client.nfs::<(Wcc, Wcc), (Wcc, Wcc)>(Procedure::Rename, &RenameArgs { from, to });
            done.map(|_| String::new())?
        }
        Link(d, n, e, m) => {
            let d = dir(d)?;
            let place = Entry {
                dir: dir(e)?,
                name: name(m),
            };
            let file = client.lookup(d, name(n))?.file;
            let done = client.nfs::<(Option<Attributes>, Wcc), (Option<Attributes>, Wcc)>(
                Procedure::Link,
                &LinkArgs { file, place },
            );
            format!("{:?}", done?.0.map(|attributes| attributes.links))
        }
        Write(d, n, at, len, byte) => {
            let d = dir(d)?;
            let file = client.lookup(d, name(n))?.file;
            let bytes: Vec<u8> = (0..*len).map(|n| byte.wrapping_add((n % 251) as u8)).collect();
            format!("{}", write(client, file, u64::from(*at), &bytes)?)
        }
        Resize(d, n, size) => {
            let d = dir(d)?;
            let file = client.lookup(d, name(n))?.file;
            let attributes = SetAttributes {
                size: Some(u64::from(*size)),
                ..SetAttributes::default()
            };
            let guard = None;
            let arguments = SetattrArgs {
                file,
                attributes,
                guard,
            };
            let wcc = client.nfs::<Wcc, Wcc>(Procedure::Setattr, &arguments)?;
            format!("{:?}", wcc.after.map(|attributes| attributes.size))
        }
        Read(d, n, at, len) => {
            let d = dir(d)?;
            let file = client.lookup(d, name(n))?.file;
            format!("{:?}", contents(client, file, u64::from(*at), *len)?)
        }
        List(d) => {
            let d = dir(d)?;
            let mut all: Vec<_> = client
                .list(d)?
                .into_iter()
                .map(|entry| {
                    let is = entry.attributes.expect("attributes");
                    let size = if is.kind == Kind::Directory { 0 } else { is.size };
                    (
                        entry.name,
                        is.kind,
                        size,
                        if is.kind == Kind::Directory { 0 } else { is.links },
                    )
                })
                .collect();
            all.sort_by(|a, b| a.0.cmp(&b.0));
            format!("{all:?}")
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_tree_in_memory_behaves_like_a_kernel_file_system(operations in operations(), apart: bool) {
        let folder = tempfile::tempdir().unwrap();
        let kernel = of_directory(folder.path(), OPEN);
        let memory = of_memory(64 << 20, OPEN);
        let mut clients = [client(&kernel, apart), client(&memory, apart)];
        let roots = [0, 1].map(|n| clients[n].mount(b"/").unwrap());
        for operation in &operations {
            // If there are several reasons to refuse an operation, the trees may report different
            // ones.
            let seen = [0, 1].map(|n| match carry_out(&mut clients[n], roots[n], operation) {
                Err(Error::Nfs(_)) => Err("refused"),
                seen => Ok(seen.expect("an answer")),
            });
            prop_assert_eq!(&seen[0], &seen[1], "{:?} in {:?}", operation, operations);
        }
    }
}
