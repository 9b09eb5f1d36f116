// Checks custom resources, as JSON on standard input, against the schemas of @kubernetes-models in the folder that is given.
const packages = {
  "cert-manager.io": "cert-manager",
  "monitoring.coreos.com": "prometheus-operator",
  "keda.sh": "keda",
  "gateway.networking.k8s.io": "gateway-api",
};

async function check(each) {
  const [group] = each.apiVersion.split("/");
  const kinds = await import(`${process.argv[2]}/@kubernetes-models/${packages[group]}/${each.apiVersion}/index.js`);
  new (kinds[each.kind] ?? kinds.default[each.kind])(each).validate();
}

Promise.all(JSON.parse(require("fs").readFileSync(0, "utf8")).map(check)).catch((error) => {
  console.error(error.message);
  process.exit(1);
});
