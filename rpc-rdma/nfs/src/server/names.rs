//! Procedures of NFSv3 on names in directories (RFC 1813 §3.3): LOOKUP, CREATE, REMOVE, RENAME,
//! LINK and similar ones.

use super::export::{Export, with};
use crate::nfs3::{
    Attributes, CreateArgs, Created, Entry, Handle, LinkArgs, LookupOk, MAX_PATH, MkdirArgs, MknodArgs,
    RenameArgs, Reply, Status, SymlinkArgs, Wcc,
};
use crate::tree::{Caller, Data, New, Outcome, check_name};

impl Export {
    pub(super) fn lookup(
        &self,
        caller: &Caller,
        Entry { dir, name }: Entry<'_>,
    ) -> Reply<LookupOk, Option<Attributes>> {
        let named = match name {
            b"." | b".." => Ok(()),
            _ => check_name(name),
        };
        let found = named.and_then(|()| self.tree.lookup(caller, &dir, name));
        let dir = self.after(&dir);
        let (file, attributes) = found.map_err(|status| (status, dir))?;
        Ok(LookupOk {
            file,
            attributes: Some(attributes),
            dir,
        })
    }

    pub(super) fn create(&self, caller: &Caller, args: CreateArgs<'_>) -> Reply<Created, Wcc> {
        let CreateArgs { place, how } = args;
        self.make(place, || self.tree.create(caller, &place.dir, place.name, &how))
    }

    pub(super) fn mkdir(&self, caller: &Caller, args: MkdirArgs<'_>) -> Reply<Created, Wcc> {
        let MkdirArgs { place, attributes } = args;
        let what = New::Directory(&attributes);
        self.make(place, || self.tree.make(caller, &place.dir, place.name, what))
    }

    pub(super) fn symlink(
        &self,
        caller: &Caller,
        args: SymlinkArgs<'_>,
        text: Data<'_>,
    ) -> Reply<Created, Wcc> {
        let SymlinkArgs {
            place, attributes, ..
        } = args;
        let what = New::Symlink(text.bytes(), &attributes);
        self.make(place, || match text.bytes() {
            text if text.len() > MAX_PATH => Err(Status::NameTooLong),
            text if text.is_empty() || text.contains(&0) => Err(Status::Invalid),
            _ => self.tree.make(caller, &place.dir, place.name, what),
        })
    }

    pub(super) fn mknod(&self, caller: &Caller, args: MknodArgs<'_>) -> Reply<Created, Wcc> {
        let MknodArgs { place, what } = args;
        self.make(place, || {
            self.tree
                .make(caller, &place.dir, place.name, New::special(&what)?)
        })
    }

    /// The common part of CREATE, MKDIR, SYMLINK and MKNOD.
    fn make(
        &self,
        place: Entry<'_>,
        make: impl FnOnce() -> Outcome<(Handle, Attributes)>,
    ) -> Reply<Created, Wcc> {
        let (made, wcc) = self.around(&place.dir, || {
            check_name(place.name)?;
            make()
        });
        let (file, attributes) = made.map_err(|status| (status, wcc))?;
        Ok(Created {
            file: Some(file),
            attributes: Some(attributes),
            wcc,
        })
    }

    /// REMOVE, or RMDIR if `directory` is set.
    pub(super) fn remove(
        &self,
        caller: &Caller,
        directory: bool,
        Entry { dir, name }: Entry<'_>,
    ) -> Reply<Wcc, Wcc> {
        let (done, wcc) = self.around(&dir, || {
            check_name(name)?;
            self.tree.remove(caller, &dir, name, directory)
        });
        with(done, wcc)
    }

    pub(super) fn rename(&self, caller: &Caller, args: RenameArgs<'_>) -> Reply<(Wcc, Wcc), (Wcc, Wcc)> {
        let RenameArgs { from, to } = args;
        let before = self.before(&from.dir);
        let (done, to_wcc) = self.around(&to.dir, || {
            check_name(from.name).and_then(|()| check_name(to.name))?;
            self.tree
                .rename(caller, (&from.dir, from.name), (&to.dir, to.name))
        });
        let after = self.after(&from.dir);
        with(done, (Wcc { before, after }, to_wcc))
    }

    pub(super) fn link(
        &self,
        caller: &Caller,
        LinkArgs { file, place }: LinkArgs<'_>,
    ) -> Reply<(Option<Attributes>, Wcc), (Option<Attributes>, Wcc)> {
        let (done, wcc) = self.around(&place.dir, || {
            check_name(place.name)?;
            self.tree.link(caller, &file, &place.dir, place.name)
        });
        with(done, (self.after(&file), wcc))
    }
}
