//! How queue pairs come by their streams, and how they end.

use crate::counters::Counter;
use crate::device::state::Core;
use crate::qp::effects::Effects;
use crate::qp::requests::Requests;
use crate::qp::{Inner, Qp};
use crate::rdmap::{Attachment, QpChange, WrongState};
use crate::stream::Stream;
use urnic_device::command::Status;
use urnic_device::vocabulary::QpState;

impl Qp {
    /// Carries out `ModifyQp`.
    pub(crate) fn modify(&self, core: &Core, change: QpChange, effects: &mut Effects) -> Result<(), Status> {
        self.command(effects, |inner, effects| {
            if change.state == Some(QpState::Reset) {
                self.reset(core, inner);
                return Ok(((), Requests::empty()));
            }
            let mut env = core.env(&self.counters, effects);
            inner
                .with_engine(|engine, stream| engine.modify(&change, &mut env, stream))
                .map_err(|WrongState| Status::WrongState)?;
            Ok(((), Requests::RESUME | Requests::RECEIVE))
        })
    }

    /// Returns the queue pair to its first state, on the same rings: posted entries are dropped,
    /// and the indices continue.
    fn reset(&self, core: &Core, inner: &mut Inner) {
        core.schedule.end_burst(&mut inner.gathering);
        if let Some(mut stream) = inner.stream.take() {
            stream.reset();
        }
        self.leave_sibling(core);
        core.memory.unbind_all_of(self.id);
        inner.engine = inner.engine.anew();
        inner.engine.receive_source().ring_never();
        inner.gathering.forget();
        (inner.blocked, inner.hung_up, inner.held, inner.timer) = (false, false, false, None);
    }

    /// Begins RDMA mode on `stream`, which is taken if that succeeds. `awaited`: its other end is
    /// this device's, too.
    pub(crate) fn attach(
        &self,
        core: &Core,
        stream: &mut Option<Box<dyn Stream>>,
        attachment: &Attachment,
        awaited: bool,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        self.command(effects, |inner, effects| {
            let Some(live) = stream.as_mut().filter(|_| !inner.dead && inner.stream.is_none()) else {
                return Err(Status::WrongState);
            };
            let mut env = core.env(&self.counters, effects);
            inner
                .engine
                .attach(attachment, &mut env, &mut **live)
                .map_err(|WrongState| Status::WrongState)?;
            self.find_sibling(core, &**live, &mut inner.engine, awaited);
            inner.stream = stream.take();
            inner.held = true;
            Ok(((), Requests::ATTACHED | Requests::RESUME | Requests::RECEIVE))
        })
    }

    /// Makes the queue pair its own peer.
    pub(crate) fn attach_loopback(
        &self,
        core: &Core,
        attachment: &Attachment,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        let tap = || {
            let ip = core.config.addresses.first()?.ip;
            Some(core.config.capture.as_ref()?.own_peer(ip, self.id))
        };
        self.command(effects, |inner, _| {
            let attached = inner.engine.attach_loopback(attachment, tap);
            attached.map_err(|WrongState| Status::WrongState)?;
            Ok(((), Requests::RESUME))
        })
    }

    /// Ends the queue pair: on return, no host memory is used any more. What its completed sends
    /// put on the stream still arrives; for a reset no more is sent.
    pub(crate) fn destroy(&self, core: &Core, reset: bool, effects: &mut Effects) {
        let mut inner = self.turns.lock();
        if inner.dead {
            return;
        }
        if !reset {
            let mut env = core.env(&self.counters, effects);
            inner.with_engine(|engine, stream| engine.transmit(&mut env, stream));
        }
        inner.dead = true;
        inner.engine.abandon();
        core.schedule.end_burst(&mut inner.gathering);
        let stream = inner.stream.take();
        drop(inner);
        self.leave_sibling(core);
        if let Some(stream) = stream {
            core.linger(stream, Vec::new());
        }
        core.memory.unbind_all_of(self.id);
        for counter in Counter::ALL {
            core.counters.add_shared(*counter, self.counters.value(*counter));
        }
    }
}
