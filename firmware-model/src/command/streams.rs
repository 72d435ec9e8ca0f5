//! Commands on streams.

use super::{Answer, Job, done, handle, ok};
use crate::rdmap::Attachment;
use std::net::SocketAddr;
use urnic_verbs_api::device::command::{Handle, Status};
use urnic_verbs_api::device::stream::{Attach, Close, Connect, Listen, Listening, MAX_STREAMING};
use zerocopy::little_endian::U32;

fn traffic_class(given: U32) -> Result<u8, Status> {
    u8::try_from(given.get()).map_err(|_| Status::InvalidArgument)
}

impl Job<'_> {
    pub(super) fn stream_connect(&mut self) -> Answer {
        let arguments: Connect = self.arguments();
        let remote = SocketAddr::from(arguments.remote);
        let local = Some(SocketAddr::from(arguments.local))
            .filter(|local| local.port() != 0 || arguments.local.ip != [0; 16]);
        let traffic_class = traffic_class(arguments.traffic_class)?;
        if remote.port() == 0 || remote.ip().is_multicast() {
            return Err(Status::InvalidArgument);
        }
        handle(
            self.core
                .streams
                .connect(self.core, remote, local, traffic_class, self.effects)?,
        )
    }

    pub(super) fn stream_listen(&mut self) -> Answer {
        let arguments: Listen = self.arguments();
        let local = SocketAddr::from(arguments.local);
        let traffic_class = traffic_class(arguments.traffic_class)?;
        let (lid, port) = self.core.streams.listen(
            self.core,
            local,
            arguments.backlog.get(),
            traffic_class,
            self.effects,
        )?;
        ok(&Listening {
            lid: lid.into(),
            port: u32::from(port).into(),
        })
    }

    pub(super) fn stream_unlisten(&self) -> Answer {
        self.core.streams.unlisten(self.handle())?;
        done()
    }

    pub(super) fn stream_send(&mut self) -> Answer {
        let sid = self.arguments::<Handle>().id.get();
        if self.command.input_len.get() > MAX_STREAMING {
            return Err(Status::InvalidArgument);
        }
        let input = self.input()?;
        let mut bytes = vec![0; input.len()];
        input.copy_out(0, &mut bytes);
        self.core.streams.send(self.core, sid, &bytes, self.effects)?;
        done()
    }

    pub(super) fn stream_receive(&mut self) -> Answer {
        let sid = self.arguments::<Handle>().id.get();
        let len = self.command.output_len.get();
        if len == 0 || len > MAX_STREAMING {
            return Err(Status::InvalidArgument);
        }
        let buffer = self.output()?;
        self.core.streams.receive(self.core, sid, buffer, self.effects)?;
        done()
    }

    pub(super) fn stream_query(&mut self) -> Answer {
        let endpoints = self.core.streams.query(self.core, self.handle(), self.effects)?;
        self.write_output(&endpoints)?;
        done()
    }

    pub(super) fn stream_close(&mut self) -> Answer {
        let arguments: Close = self.arguments();
        let abort = arguments.abort.get() != 0;
        self.core
            .streams
            .close(self.core, arguments.sid.get(), abort, self.effects)?;
        done()
    }

    pub(super) fn stream_attach(&mut self) -> Answer {
        let (arguments, attachment) = self.attachment()?;
        let qp = self
            .core
            .qps
            .find(arguments.qid.get())
            .ok_or(Status::InvalidHandle)?;
        self.core
            .streams
            .attach(self.core, arguments.sid.get(), &qp, &attachment, self.effects)?;
        done()
    }

    pub(super) fn loopback_attach(&mut self) -> Answer {
        let (arguments, attachment) = self.attachment()?;
        let qp = self
            .core
            .qps
            .find(arguments.qid.get())
            .ok_or(Status::InvalidHandle)?;
        qp.attach_loopback(self.core, &attachment, self.effects)?;
        done()
    }

    fn attachment(&self) -> Result<(Attach, Attachment), Status> {
        let arguments: Attach = self.arguments();
        let limits = &self.core.config.limits;
        let mut attachment = Attachment::try_from(&arguments).map_err(|_| Status::InvalidArgument)?;
        // Start-up may name 0x3fff, "no limit of mine" (EMPA-37): the device's own holds.
        attachment.ird = attachment.ird.min(limits.ird);
        attachment.ord = attachment.ord.min(limits.ord);
        Ok((arguments, attachment))
    }
}
