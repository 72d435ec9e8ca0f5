//! Stream events of native connections.

use rustix::io::Errno;

use super::state::Engine;
use super::streams::World;
use crate::carrier::StreamOwner;

impl<'a> StreamOwner<World<'a>> for Engine {
    fn has_queue_pair(&self, qid: u32) -> bool {
        self.connected.contains_key(&qid)
    }

    fn has_listener(&self, lid: u32) -> bool {
        self.numbers.has_listener(lid)
    }

    fn has_stream(&self, sid: u32) -> bool {
        self.streams.contains_key(&sid)
    }

    fn first_fpdu(&mut self, _world: &mut World<'a>, qid: u32) {
        Engine::first_fpdu(self, qid);
    }

    fn arrived(&mut self, world: &mut World<'a>, lid: u32, sid: u32) {
        Engine::arrived(self, world, lid, sid);
    }

    fn connected(&mut self, world: &mut World<'a>, sid: u32, outcome: Result<(), Errno>) {
        Engine::connected(self, world, sid, outcome);
    }

    fn received(&mut self, world: &mut World<'a>, sid: u32, bytes: Result<&[u8], Errno>) {
        Engine::received(self, world, sid, bytes);
    }

    fn closed(&mut self, world: &mut World<'a>, sid: u32) {
        Engine::closed(self, world, sid);
    }
}
