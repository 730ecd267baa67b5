//! What the rules need of the objects: Services, policies, pools, workloads and nodes.

use super::{
    objects::Object,
    selector::{Requirement, Selector},
    yaml::{Node, Place},
};

/// A Service that a policy may announce: of type `LoadBalancer`, or with `externalIPs`.
#[derive(Debug, Clone)]
pub(super) struct Service {
    pub object: Object,
    pub load_balancer: bool,
    pub external_ips: Vec<String>,
    /// Addresses that it asks for.
    pub wanted: Vec<String>,
    pub class: Option<String>,
    pub policy: Policy,
    /// Where the policy stands, else where the Service begins.
    pub at: Place,
    /// Nothing if it has none: somebody else makes its endpoints.
    pub selector: Option<Selector>,
}

/// externalTrafficPolicy as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Policy {
    Cluster,
    Local,
    /// A template or something unknown.
    Other(String),
}

/// A `CiliumL2AnnouncementPolicy`.
#[derive(Debug, Clone)]
pub(super) struct Announcement {
    pub name: String,
    pub services: Selector,
    pub nodes: Selector,
    pub interfaces: Vec<String>,
    pub load_balancer_ips: bool,
    pub external_ips: bool,
}

/// A `CiliumLoadBalancerIPPool`.
#[derive(Debug, Clone)]
pub(super) struct Pool {
    pub name: String,
    pub blocks: Vec<String>,
    pub services: Selector,
    pub disabled: bool,
}

/// Something that makes pods.
#[derive(Debug, Clone)]
pub(super) struct Workload {
    pub object: Object,
    /// The pod: its template, or itself.
    pub metadata: Option<Node>,
    pub spec: Option<Node>,
    pub replicas: Option<String>,
}

/// Everything that the rules look at.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub services: Vec<Service>,
    pub announcements: Vec<Announcement>,
    pub pools: Vec<Pool>,
    pub workloads: Vec<Workload>,
    pub nodes: Vec<Object>,
    pub notes: Vec<String>,
}

/// Kinds that make objects which are not in the tree: chart or bundle, and how to pass them on.
const MAKERS: [(&str, &str, &str); 6] = [
    ("helm.toolkit.fluxcd.io", "HelmRelease", "render it with `helm template`"),
    ("helm.cattle.io", "HelmChart", "render it with `helm template`"),
    ("argoproj.io", "Application", "render it"),
    ("argoproj.io", "ApplicationSet", "render it"),
    (
        "gateway.networking.k8s.io",
        "Gateway",
        "its Service is made by the controller: look at it on the cluster",
    ),
    (
        "networking.k8s.io",
        "Ingress",
        "its Service, if it has one of its own, is made by the controller: look at it on the cluster",
    ),
];

impl Model {
    /// From the objects.
    pub fn new(objects: Vec<Object>) -> Self {
        let mut model = Self::default();
        let mut makers = std::collections::BTreeMap::<usize, Vec<String>>::new();
        for object in objects {
            if let Some(index) = MAKERS
                .iter()
                .position(|(group, kind, _)| *group == object.group && *kind == object.kind)
            {
                makers.entry(index).or_default().push(object.title());
            }
            if object.kind == "Kustomization" && object.group == "kustomize.toolkit.fluxcd.io" {
                for key in ["patches", "postBuild", "targetNamespace", "components"] {
                    if object.root.at(&["spec", key]).is_some() {
                        model.notes.push(format!("{}: `{key}` is not applied", object.title()));
                    }
                }
            }
            match (object.group.as_str(), object.kind.as_str()) {
                ("", "Service") => model.services.extend(Service::new(object)),
                ("cilium.io", "CiliumL2AnnouncementPolicy") => {
                    model.announcements.push(Announcement::new(&object));
                }
                ("cilium.io", "CiliumLoadBalancerIPPool") => model.pools.push(Pool::new(&object)),
                ("", "Node") => model.nodes.push(object),
                (
                    "apps" | "batch" | "",
                    "DaemonSet"
                    | "Deployment"
                    | "StatefulSet"
                    | "ReplicaSet"
                    | "Pod"
                    | "ReplicationController"
                    | "Job",
                ) => model.workloads.push(Workload::new(object)),
                _ => {}
            }
        }
        for (index, mut titles) in makers {
            const SHOWN: usize = 3;
            let (_, _, next) = MAKERS[index];
            let more = titles.len().saturating_sub(SHOWN);
            titles.truncate(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            model.notes.push(format!(
                "what {}{more} makes is not in the tree and not judged: {next}",
                titles.join(", ")
            ));
        }
        model
    }
}

fn texts(node: Option<&Node>) -> Vec<String> {
    node.map(Node::items)
        .unwrap_or_default()
        .iter()
        .filter_map(Node::text)
        .map(str::to_owned)
        .collect()
}

/// Annotations by which a Service asks for addresses.
const WANTED: [&str; 2] = ["lbipam.cilium.io/ips", "io.cilium/lb-ipam-ips"];

impl Service {
    fn new(object: Object) -> Option<Self> {
        let spec = object.root.get("spec")?;
        let kind = spec.text_of("type").unwrap_or("ClusterIP");
        let load_balancer = kind == "LoadBalancer";
        let external_ips = texts(spec.get("externalIPs"));
        if !load_balancer && external_ips.is_empty() {
            return None;
        }
        let field = spec.get("externalTrafficPolicy");
        let policy = match field.and_then(Node::text) {
            None if field.is_none_or(|node| node.value == super::yaml::Value::Null) => {
                Policy::Cluster
            }
            Some("Cluster") => Policy::Cluster,
            Some("Local") => Policy::Local,
            Some(other) => Policy::Other(other.to_owned()),
            None => Policy::Other("a mapping".to_owned()),
        };
        let annotations = object.root.at(&["metadata", "annotations"]);
        let mut wanted: Vec<String> = WANTED
            .iter()
            .filter_map(|key| annotations?.text_of(key))
            .flat_map(|text| text.split(','))
            .map(|one| one.trim().to_owned())
            .collect();
        wanted.extend(spec.text_of("loadBalancerIP").map(str::to_owned));
        let selector = spec.get("selector").filter(|node| !node.members().is_empty());
        Some(Self {
            load_balancer,
            external_ips,
            wanted,
            class: spec.text_of("loadBalancerClass").map(str::to_owned),
            policy,
            at: field.map_or(object.at(), |node| node.at),
            selector: selector.map(Selector::labels),
            object,
        })
    }

    /// A label as the selectors of policies and pools see it: the Service's, or its name or
    /// namespace under the names that Cilium gives them.
    pub fn label(&self, key: &str) -> Option<&str> {
        match key {
            "io.kubernetes.service.name" => Some(self.object.name()),
            "io.kubernetes.service.namespace" => Some(self.object.namespace()),
            _ => self.object.label(key),
        }
    }
}

impl Announcement {
    fn new(object: &Object) -> Self {
        let spec = object.root.get("spec");
        let get = |key: &str| spec.and_then(|spec| spec.get(key));
        Self {
            name: object.name().to_owned(),
            services: get("serviceSelector").map(Selector::new).unwrap_or_default(),
            nodes: get("nodeSelector").map(Selector::new).unwrap_or_default(),
            interfaces: texts(get("interfaces")),
            load_balancer_ips: get("loadBalancerIPs").is_some_and(Node::is_true),
            external_ips: get("externalIPs").is_some_and(Node::is_true),
        }
    }

    /// Whether it announces anything at all.
    pub fn announces(&self) -> bool {
        self.load_balancer_ips || self.external_ips
    }

    /// `all nodes`, or what it takes of them.
    pub fn where_(&self) -> String {
        let nodes = if self.nodes.0.is_empty() {
            "every node".to_owned()
        } else {
            format!("nodes with {}", self.nodes)
        };
        if self.interfaces.is_empty() {
            nodes
        } else {
            format!("{nodes} ({})", self.interfaces.join(", "))
        }
    }
}

impl Pool {
    fn new(object: &Object) -> Self {
        let spec = object.root.get("spec");
        let get = |key: &str| spec.and_then(|spec| spec.get(key));
        let blocks = ["blocks", "cidrs"]
            .into_iter()
            .filter_map(get)
            .flat_map(Node::items)
            .map(|block| match (block.text_of("cidr"), block.text_of("start")) {
                (Some(cidr), _) => cidr.to_owned(),
                (None, Some(start)) => match block.text_of("stop") {
                    Some(stop) => format!("{start} to {stop}"),
                    None => start.to_owned(),
                },
                (None, None) => "?".to_owned(),
            })
            .collect();
        Self {
            name: object.name().to_owned(),
            blocks,
            services: get("serviceSelector").map(Selector::new).unwrap_or_default(),
            disabled: get("disabled").is_some_and(Node::is_true),
        }
    }
}

impl Workload {
    fn new(object: Object) -> Self {
        let pod = if object.kind == "Pod" {
            Some(&object.root)
        } else {
            object.root.at(&["spec", "template"])
        };
        let part = |key: &str| pod.and_then(|pod| pod.get(key)).cloned();
        let replicas = object.root.at(&["spec", "replicas"]).and_then(Node::text);
        Self {
            metadata: part("metadata"),
            spec: part("spec"),
            replicas: replicas.map(str::to_owned),
            object,
        }
    }

    /// The labels of its pods.
    pub fn labels(&self) -> Option<&Node> {
        self.metadata.as_ref()?.get("labels")
    }

    /// `Deployment games/minecraft (2 replicas)`
    pub fn title(&self) -> String {
        match (self.object.kind.as_str(), self.replicas.as_deref()) {
            ("Deployment" | "StatefulSet" | "ReplicaSet", replicas) => {
                let replicas = replicas.unwrap_or("1");
                let word = if replicas == "1" { "replica" } else { "replicas" };
                format!("{} ({replicas} {word})", self.object.title())
            }
            _ => self.object.title(),
        }
    }

    /// The requirements on a node, without which its pods do not go there: any one of the rows has
    /// to hold. An error says what cannot be computed.
    pub fn places(&self) -> Result<Vec<Selector>, String> {
        let Some(spec) = &self.spec else { return Ok(vec![Selector::default()]) };
        if let Some(node) = spec.text_of("nodeName") {
            return Err(format!("its pods are bound to the node {node}"));
        }
        for kind in ["podAffinity", "podAntiAffinity"] {
            let required =
                spec.at(&["affinity", kind, "requiredDuringSchedulingIgnoredDuringExecution"]);
            if required.is_some_and(|node| !node.items().is_empty()) {
                return Err(format!(
                    "its pods have a required {kind}, which depends on other pods"
                ));
            }
        }
        let base = spec.get("nodeSelector").map(Selector::labels).unwrap_or_default();
        let required = spec.at(&[
            "affinity",
            "nodeAffinity",
            "requiredDuringSchedulingIgnoredDuringExecution",
            "nodeSelectorTerms",
        ]);
        let Some(required) = required else { return Ok(vec![base]) };
        Ok(required
            .items()
            .iter()
            .map(|term| {
                let mut all = base.clone();
                let list = |key: &str| term.get(key).map(Node::items).unwrap_or_default();
                all.0.extend(list("matchExpressions").iter().map(Requirement::expression));
                // A field is no label: metadata.name, as a requirement that no label meets.
                all.0.extend(list("matchFields").iter().map(Requirement::expression));
                all
            })
            .collect())
    }

    /// Whether its pods tolerate a taint.
    pub fn tolerates(&self, key: &str, value: &str, effect: &str) -> bool {
        let tolerations = self.spec.as_ref().and_then(|spec| spec.get("tolerations"));
        tolerations.map(Node::items).unwrap_or_default().iter().any(|one| {
            let effect_meets = one.text_of("effect").is_none_or(|it| it.is_empty() || it == effect);
            let exists = one.text_of("operator") == Some("Exists");
            let key_meets = match one.text_of("key").filter(|key| !key.is_empty()) {
                None => exists,
                Some(it) => it == key,
            };
            let value_meets = exists || one.text_of("value").unwrap_or_default() == value;
            effect_meets && key_meets && value_meets
        })
    }

    /// Whether its pods tolerate every taint that keeps pods away.
    pub fn tolerates_all(&self) -> bool {
        let any = "a key that no toleration names";
        self.tolerates(any, any, "NoSchedule") && self.tolerates(any, any, "NoExecute")
    }
}
