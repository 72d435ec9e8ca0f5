//! Another implementation of the protocol's types decodes the messages of this crate, and the
//! reverse.

use super::*;
use nfs3_types::nfs3 as theirs;
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use urnic_nfs::xdr::{Reader, Xdr};

fn packed(value: &impl Pack) -> Vec<u8> {
    let mut bytes = Vec::new();
    value.pack(&mut bytes).expect("a Vec takes it");
    bytes
}

fn put<'a>(value: &impl Xdr<'a>) -> Vec<u8> {
    let mut bytes = Vec::new();
    value.put(&mut bytes);
    bytes
}

#[test]
fn arguments_encode_as_in_nfs3_types() {
    let handle = Handle::new(b"a handle of 23 bytes...");
    let their_handle = || theirs::nfs_fh3 {
        data: Opaque::owned(handle.bytes().to_vec()),
    };
    let ours = ReadArgs {
        file: handle,
        offset: 1 << 40,
        count: 77,
    };
    let other = theirs::READ3args {
        file: their_handle(),
        offset: 1 << 40,
        count: 77,
    };
    assert_eq!(put(&ours), packed(&other));
    let ours = ReaddirplusArgs {
        dir: handle,
        cookie: 9,
        verifier: *b"12345678",
        names: 100,
        count: 200,
    };
    let other = theirs::READDIRPLUS3args {
        dir: their_handle(),
        cookie: 9,
        cookieverf: theirs::cookieverf3(*b"12345678"),
        dircount: 100,
        maxcount: 200,
    };
    assert_eq!(put(&ours), packed(&other));
    let mut write = put(&WriteArgs {
        file: handle,
        offset: 3,
        count: 5,
        stable: Stable::DataSync,
        len: 5,
    });
    write.extend_from_slice(b"abcde\0\0\0");
    let other = theirs::WRITE3args {
        file: their_handle(),
        offset: 3,
        count: 5,
        stable: theirs::stable_how::DATA_SYNC,
        data: Opaque::borrowed(b"abcde"),
    };
    assert_eq!(write, packed(&other));
    let parsed = WriteArgs::take(&mut Reader(&write)).unwrap();
    assert_eq!((parsed.len, parsed.stable), (5, Stable::DataSync));
}

#[test]
fn replies_decode_as_in_nfs3_types() {
    let folder = tempfile::tempdir().unwrap();
    let server = of_directory(folder.path(), OPEN);
    let mut client = client(&server, false);
    let root = client.mount(b"/").unwrap();
    for name in [&b"a"[..], b"bc", b"def"] {
        let file = create(&mut client, root, name, 0o640).unwrap();
        write(&mut client, file, 0, name).unwrap();
    }
    let ask = |procedure: Procedure, arguments: Vec<u8>| {
        let credential = Credential::Anonymous;
        let (program, version, procedure) = (PROGRAM, VERSION, procedure as u32);
        let call = urnic_nfs::rpc::Call {
            xid: 1,
            program,
            version,
            procedure,
            credential,
        };
        let message = [call.emit(), arguments].concat();
        let request = Request {
            peer: PEER,
            message: &message,
            item: None,
            back: None,
        };
        let reply = server.call(request).unwrap().message;
        urnic_nfs::rpc::results(&reply).unwrap().0.to_vec()
    };
    let reply = ask(Procedure::Getattr, put(&root));
    let (theirs, len) = theirs::GETATTR3res::unpack(&mut &reply[..]).unwrap();
    assert_eq!(len, reply.len());
    let (theirs, ours) = (theirs.unwrap().obj_attributes, client.attributes(root).unwrap());
    assert_eq!(
        (theirs.fileid, theirs.size, theirs.mode),
        (ours.fileid, ours.size, ours.mode)
    );
    assert_eq!(
        (theirs.mtime.seconds, theirs.mtime.nseconds),
        (ours.mtime.seconds, ours.mtime.nanos)
    );

    for procedure in [Procedure::Fsinfo, Procedure::Fsstat, Procedure::Pathconf] {
        let reply = ask(procedure, put(&root));
        let len = match procedure {
            Procedure::Fsinfo => theirs::FSINFO3res::unpack(&mut &reply[..]).unwrap().1,
            Procedure::Fsstat => theirs::FSSTAT3res::unpack(&mut &reply[..]).unwrap().1,
            _ => theirs::PATHCONF3res::unpack(&mut &reply[..]).unwrap().1,
        };
        assert_eq!(len, reply.len(), "{procedure:?}");
    }
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let arguments = ReaddirplusArgs {
        dir: root,
        cookie: 0,
        verifier: [0; 8],
        names: 4096,
        count: 4096,
    };
    let reply = ask(Procedure::Readdirplus, put(&arguments));
    let (theirs, len) = theirs::READDIRPLUS3res::unpack(&mut &reply[..]).unwrap();
    assert_eq!(len, reply.len());
    let listed = theirs.unwrap().reply;
    assert!(listed.eof);
    let mut names: Vec<_> = listed
        .entries
        .0
        .iter()
        .map(|entry| entry.name.0.to_vec())
        .collect();
    names.sort();
    assert_eq!(names, [&b"."[..], b"..", b"a", b"bc", b"def"]);

    let lookup = put(&Entry {
        dir: root,
        name: b"no",
    });
    let reply = ask(Procedure::Lookup, lookup);
    let (theirs, len) = theirs::LOOKUP3res::unpack(&mut &reply[..]).unwrap();
    assert_eq!(len, reply.len());
    assert!(matches!(
        theirs,
        theirs::Nfs3Result::Err((theirs::nfsstat3::NFS3ERR_NOENT, _))
    ));
}
