//! The [`StreamCarrier`] that reaches engines of other nodes by links. The links' own carrier
//! ([`slipway_link::Carrier`]) moves the bytes; this module maps its streams to the engine's
//! connections.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use slipway_link::{
    Command, End, Ended, Event as LinkEvent, Links, LinksError, News, Renewal, Settings, Share,
    SharesView, StreamId,
};
use slipway_ring::cross::Tail;
use slipway_sgiov_spec::Address;

use crate::error::errno_number;
use crate::policy::{Policy, Tenant};
use crate::remote::{Destined, Event, Family, Line, StreamCarrier};

/// A connection that the carrier serves from the engine's side.
struct Carried {
    line: Line,
    /// The link's stream, or `None` until the link has named it.
    stream: Option<StreamId>,
    /// Set once the line was given to the link.
    attached: bool,
    /// Set once the program has closed its side.
    closed: bool,
}

/// Carries streams to other nodes, over the links that [`Settings`] describe.
pub struct NodeCarrier {
    links: slipway_link::Carrier,
    settings: Settings,
    carried: HashMap<u32, Carried>,
    /// Connections by stream.
    streams: HashMap<StreamId, u32>,
    /// Streams that other engines ask for, by the number that the engine was told for each.
    asked: HashMap<u64, StreamId>,
    next: u64,
    shares: Option<SharesView>,
}

/// The reason why a carrier cannot start or renew its settings.
#[derive(Debug, thiserror::Error)]
pub enum CarrierError {
    /// The file cannot be read, or something in it is wrong.
    #[error("{}: {text}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The description of the error.
        text: String,
    },
    /// Wrong settings or certificates, or an error of the system.
    #[error("links to other engines: {0}")]
    Links(#[from] LinksError),
}

impl NodeCarrier {
    /// Starts a carrier with the settings of the file ([`NodeCarrier::settings`]) and the weights
    /// and rates of `policy`. Returns `None` if there is no such file.
    ///
    /// # Errors
    /// [`CarrierError`].
    pub fn read(path: &Path, policy: &Policy) -> Result<Option<Self>, CarrierError> {
        let Some(settings) = Self::settings(path)? else { return Ok(None) };
        let carrier = Self::start(settings)?;
        for Share { tenant, weight, rate } in shares(policy) {
            carrier.links.command(Command::Weight(tenant.clone(), weight));
            if let Some(rate) = rate {
                carrier.links.command(Command::Rate(tenant, rate));
            }
        }
        Ok(Some(carrier))
    }

    /// Returns the settings in force.
    pub fn goes_by(&self) -> &Settings {
        &self.settings
    }

    /// Reads settings from the file (TOML, [`Settings`]). Relative paths in it are relative to its
    /// folder. Returns `None` if there is no such file.
    ///
    /// # Errors
    /// [`CarrierError`].
    pub fn settings(path: &Path) -> Result<Option<Settings>, CarrierError> {
        let wrong = |text: String| CarrierError::File { path: path.to_owned(), text };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(wrong(error.to_string())),
        };
        let mut settings: Settings =
            toml::from_str(&text).map_err(|error| wrong(in_line(&text, &error)))?;
        // An absolute path stays as it is.
        let folder = path.parent().unwrap_or(Path::new(""));
        for file in [&mut settings.certificate, &mut settings.key, &mut settings.authority] {
            *file = folder.join(&*file);
        }
        Ok(Some(settings))
    }

    /// Reads new settings and certificates for a carrier whose settings are `current`, for
    /// [`StreamCarrier::renew`].
    ///
    /// # Errors
    /// [`CarrierError`]: also if there is no such file.
    pub fn renewal(
        path: &Path,
        policy: &Policy,
        current: &Settings,
    ) -> Result<Renewal, CarrierError> {
        let gone = || CarrierError::File {
            path: path.to_owned(),
            text: "there is no such file; an engine without links is one that starts without"
                .into(),
        };
        let settings = Self::settings(path)?.ok_or_else(gone)?;
        Ok(Renewal::new(settings, current, shares(policy))?)
    }

    /// Listens for other engines, as the settings say, and starts their carrier.
    ///
    /// # Errors
    /// Wrong settings or certificates, or an error of the system.
    pub fn start(settings: Settings) -> Result<Self, LinksError> {
        let links = Links::new(settings.clone())?;
        let links = slipway_link::start_carrier(links)?;
        let (carried, streams, asked) = Default::default();
        Ok(Self { links, settings, carried, streams, asked, next: 0, shares: None })
    }

    fn attach(&mut self, connection: u32, stream: StreamId) {
        let Some(carried) = self.carried.get_mut(&connection) else { return };
        (carried.stream, carried.attached) = (Some(stream), true);
        let line = carried.line.clone();
        let entry = (line.family, line.entry);
        let Line { arena, stream: number, side, eventfd: bell, regions, .. } = line;
        let end = End { arena, regions, number, side, bell };
        self.links.command(Command::Attach { stream, end, entry });
        self.streams.insert(stream, connection);
    }

    fn news(&mut self, news: News) -> Option<Event> {
        match news {
            News::Opening { ticket, stream } => {
                let connection = u32::try_from(ticket).ok()?;
                match stream {
                    Ok(stream) => {
                        self.opening(connection, stream);
                        None
                    }
                    Err(errno) => {
                        self.carried.remove(&connection);
                        Some(Event::Refused { connection, errno })
                    }
                }
            }
            News::Event(LinkEvent::Asked { stream, tenant, source, destination, .. }) => {
                let incoming = self.next;
                self.next += 1;
                self.asked.insert(incoming, stream);
                let into = Destined::Tenant(tenant);
                Some(Event::Incoming { incoming, into, from: source, to: destination })
            }
            News::Event(LinkEvent::Opened(stream)) => {
                let connection = *self.streams.get(&stream)?;
                self.attach(connection, stream);
                Some(Event::Connected { connection })
            }
            News::Event(LinkEvent::Ended { stream, ended, attached, region }) => {
                self.ended(stream, ended, attached, Tail::default().placed(region))
            }
            News::Reports(_) => None,
            News::Shares(view) => {
                self.shares = Some(view);
                None
            }
        }
    }

    fn opening(&mut self, connection: u32, stream: StreamId) {
        let Some(carried) = self.carried.get_mut(&connection) else { return };
        carried.stream = Some(stream);
        let closed = carried.closed;
        self.streams.insert(stream, connection);
        if closed {
            self.links.command(Command::Reset(stream));
        }
    }

    fn ended(
        &mut self,
        stream: StreamId,
        ended: Ended,
        attached: bool,
        last: Tail,
    ) -> Option<Event> {
        let connection = *self.streams.get(&stream)?;
        let given = self.carried.get(&connection).is_some_and(|carried| carried.attached);
        if given && !attached {
            // The line is still on its way to the link, which reports the end again once it has let
            // go of the line.
            return None;
        }
        self.streams.remove(&stream);
        self.carried.remove(&connection);
        let reset = errno_number(Errno::CONNRESET);
        Some(match ended {
            _ if given => Event::Ended { connection, last },
            Ended::Refused(errno) => Event::Refused { connection, errno },
            _ => Event::Refused { connection, errno: reset },
        })
    }
}

/// Returns each tenant's share of the links by the policy. Rates are in bytes there, in bits in the
/// policy.
fn shares(policy: &Policy) -> Vec<Share> {
    let share = |tenant: &Tenant| Share {
        tenant: tenant.name.clone(),
        weight: tenant.weight,
        rate: tenant.rate.map(|bits| (bits / 8).max(1)),
    };
    policy.tenants().iter().map(share).collect()
}

/// Returns the parser's message with the line number.
fn in_line(text: &str, error: &toml::de::Error) -> String {
    let at = error.span().map_or(0, |span| span.start);
    format!("line {}: {}", crate::policy::line(text, at), error.message().replace('\n', " "))
}

impl StreamCarrier for NodeCarrier {
    fn renew(&mut self, renewal: Renewal) {
        self.settings = renewal.settings().clone();
        self.links.command(Command::Renew(Box::new(renewal)));
    }

    fn is_for(&self, tenant: &str, to: &Address) -> bool {
        // After a defect, connections are left to the kernel: nobody would answer them.
        !self.links.has_ended() && self.settings.engine_of(tenant, to.ip).is_some()
    }

    fn family(&mut self, number: u32, family: Family) {
        self.links.join(number, family);
    }

    fn family_ended(&mut self, family: u32) {
        self.links.part(family);
    }

    fn connect(&mut self, connection: u32, tenant: &str, from: Address, to: Address, line: Line) {
        let carried = Carried { line, stream: None, attached: false, closed: false };
        self.carried.insert(connection, carried);
        let (ticket, tenant) = (connection.into(), tenant.into());
        self.links.command(Command::Open { ticket, tenant, source: from, destination: to });
    }

    fn answer(&mut self, incoming: u64, answer: Result<(u32, Line), u32>) {
        let Some(stream) = self.asked.remove(&incoming) else { return };
        match answer {
            Ok((connection, line)) => {
                let carried = Carried { line, stream: None, attached: false, closed: false };
                self.carried.insert(connection, carried);
                self.attach(connection, stream);
            }
            Err(errno) => self.links.command(Command::Refuse(stream, errno)),
        }
    }

    fn closed(&mut self, connection: u32) {
        let Some(carried) = self.carried.get_mut(&connection) else { return };
        carried.closed = true;
        match carried.stream {
            Some(stream) if carried.attached => self.links.command(Command::Leave(stream)),
            Some(stream) => self.links.command(Command::Reset(stream)),
            // The link has not named the stream yet.
            None => {}
        }
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.links.descriptor()]
    }

    fn events(&mut self) -> Vec<Event> {
        let news: Vec<_> = self.links.news().collect();
        news.into_iter().filter_map(|news| self.news(news)).collect()
    }

    fn shares(&mut self) -> Option<SharesView> {
        self.links.command(Command::Shares);
        self.shares.clone()
    }
}
