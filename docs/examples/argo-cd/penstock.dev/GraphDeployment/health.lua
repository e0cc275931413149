-- Health of a GraphDeployment for Argo CD: the key resource.customizations.health.penstock.dev_GraphDeployment of argocd-cm.
local function result(status, message)
  return { status = status, message = message }
end

if obj.metadata.deletionTimestamp ~= nil then
  return result("Progressing", "the graph is being deleted")
end
if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return result("Progressing", "waiting for the operator to observe the newest specification")
end

local conditions = {}
for _, each in ipairs(obj.status.conditions or {}) do
  conditions[each.type] = each
end
local function is_true(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end

for _, name in ipairs({ "Stalled", "Degraded" }) do
  if is_true(name) then
    return result("Degraded", conditions[name].reason .. ": " .. conditions[name].message)
  end
end
if conditions.Reconciling ~= nil and conditions.Reconciling.reason == "Paused" then
  return result("Suspended", conditions.Reconciling.message)
end
if is_true("Reconciling") then
  return result("Progressing", conditions.Reconciling.message)
end
if not is_true("Ready") then
  return result("Progressing", conditions.Ready ~= nil and conditions.Ready.message or "waiting for condition Ready")
end
return result("Healthy", conditions.Ready.message)
